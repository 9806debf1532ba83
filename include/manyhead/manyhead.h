/* manyhead: multi-head attention on CPUs. This header is the whole C interface.
 *
 *   out = softmax(mask(softcap(scale * q k^T) + alibi + bias)) v      for every batch entry and head
 *
 * How to use it: fill an mh_problem (what to compute), call mh_plan_create once, then mh_plan_run with the
 * pointers as often as needed; or call mh_attention, which does both.
 *
 * Rules that hold everywhere
 *  - Zero-initialise a struct, set struct_size = sizeof(it), then set fields. Zero is each field's default.
 *    Fields are only ever appended, so a program built against an older header keeps working.
 *  - Dimensions: batch, heads (of q), kv_heads (of k and v; query head h reads kv head h / (heads / kv_heads)), q_len,
 *    kv_len, head_dim (of q and k), v_dim (of v and out). Any of them >= 1; batch, q_len and kv_len may be 0.
 *  - Strides count elements and may be anything that stays in the caller's memory: 0 (broadcast) and negative too, the
 *    last dimension included; only outputs must not overlap an input or themselves: each stride of theirs must step over
 *    all that smaller ones reach.
 *  - "real" below means float, and double when mh_problem.dtype is MH_DTYPE_F64.
 *  - Every function that returns mh_status validates first: on an error no output has been touched and
 *    mh_last_error() says which argument was wrong, what it was and what was expected.
 *  - Results have the same bits for any number of threads and whatever else is in the batch. The lengths of the arrays, not
 *    seqused_k, choose how they are computed: padded to another kv_len an entry may differ in the last bits where kv_len
 *    is up to 32, and in f32 on AMX.
 *  - A row that may attend no key gives out 0, weights 0, lse -inf (lse = sink where there is a sink), and success.
 *    What a key or value holds, NaN and inf too, changes no bit of a row that may not attend it; NaN and inf in one that it
 *    attends reach it, but a score that becomes -inf is a weight of 0.
 *  - A weight is 2^x, with x = log2(e) times the score less the largest of its row. 2^x is within 1 unit in the last place, and
 *    rounding x, which grows with it, adds up to |x| / 2 units. Where a matrix unit multiplies 2^x is within 1e-7, in bf16
 *    3e-6. What is below 2^-100 of the largest of its row (f64: 2^-996) is 0.
 *  - A call needs at most 128 KB of stack, on each thread that works on it.
 *  - All functions may be called from several threads at once, in the destructors of a thread and of the process too, and in
 *    forked processes: those use the calling thread alone if their parent had used several. Nothing aborts, throws, or
 *    changes the caller's floating-point state. Nothing prints, but what the environment variables MH_VERBOSE and
 *    MH_PROFILE ask for.
 */
#ifndef MANYHEAD_MANYHEAD_H
#define MANYHEAD_MANYHEAD_H

#include <stddef.h>
#include <stdint.h>

#define MH_VERSION_MAJOR 0
#define MH_VERSION_MINOR 1
#define MH_VERSION_PATCH 0

#if defined(__GNUC__)
#define MH_API __attribute__((visibility("default")))
#else
#define MH_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status, version ------------------------------------------------------------------------------------------ */

typedef enum mh_status {
  MH_OK = 0,
  MH_INVALID_ARGUMENT = 1, /* an argument is wrong; mh_last_error() names it */
  MH_UNSUPPORTED = 2,      /* the request makes sense, this build or CPU cannot do it */
  MH_OUT_OF_MEMORY = 3,
  MH_INTERNAL_ERROR = 4 /* a defect of manyhead, or what the host's parallel_for threw or did not call */
} mh_status;

/* Name of a status ("MH_OK", ...); "unknown" for other numbers. Static storage. */
MH_API const char* mh_status_name(int32_t status);

/* What went wrong in the last call of this thread that returned something other than MH_OK; "" before the first one.
 * Valid until the next failing call of this thread. */
MH_API const char* mh_last_error(void);

/* "0.1.0"; and major * 10000 + minor * 100 + patch. */
MH_API const char* mh_version(void);
MH_API int32_t mh_version_number(void);

/* ---- Data types ----------------------------------------------------------------------------------------------- */

typedef enum mh_dtype {
  MH_DTYPE_F32 = 0,
  MH_DTYPE_F64 = 1,
  MH_DTYPE_BF16 =
      2,           /* 16-bit storage, arithmetic in f32; where a matrix unit multiplies, weights are rounded to bf16 */
  MH_DTYPE_F16 = 3 /* 16-bit storage, arithmetic in f32 */
} mh_dtype;

MH_API int32_t mh_dtype_count(void);
MH_API const char* mh_dtype_name(int32_t dtype); /* "f32", ...; NULL when out of range */
MH_API size_t mh_dtype_size(int32_t dtype);      /* bytes; 0 when out of range */

/* ---- The machine ---------------------------------------------------------------------------------------------- */

/* The instruction sets this build has kernels for, best first: "amx_fp16" and "amx" (AVX-512, and
 * AMX for f32, bf16 and f16, the former with its multiplication of f16; the first call asks Linux to let the process use
 * it), "avx512_bf16" (AVX-512, with VDPBF16PS for bf16; before "avx512" where that is faster than FMA, not on Intel's),
 * "avx512", "avx2", "sse2"; "neon_bf16" (with BFMMLA for bf16), "neon". */
MH_API int32_t mh_isa_count(void);
MH_API const char* mh_isa_name(int32_t isa);  /* NULL when out of range */
MH_API int32_t mh_isa_supported(int32_t isa); /* 1 when this CPU and operating system can run it, else 0 */
MH_API const char* mh_isa_current(void);      /* the one that new plans use; NULL where MH_ISA is wrong */
/* Forces the instruction set of plans made from now on, in the whole process; NULL or "" goes back to the best one.
 * The environment variable MH_ISA does the same at start-up. MH_INVALID_ARGUMENT: no such name in this build;
 * MH_UNSUPPORTED: the CPU lacks it. A bad MH_ISA is reported by every mh_plan_create.
 * Where the instruction set has a matrix unit, f32 goes to it on a machine with fewer than 16 CPUs, whatever number of them
 * a process or a call uses: it is faster on few, multiply-adds are where all of many work. The environment variable
 * MH_F32_UNIT=0 or 1 decides it otherwise; results of f32 differ in their last bits. Another value is reported as a bad
 * MH_ISA is. */
MH_API mh_status mh_set_isa(const char* name);

/* Most threads a call uses: the process-wide cap (mh_set_threads or MH_THREADS), else all CPUs this process may
 * run on. mh_set_threads(0) removes the cap; negative numbers are errors. */
MH_API int32_t mh_threads(void);
MH_API mh_status mh_set_threads(int32_t threads);

/* Facts about the machine as JSON: isa, threads, f32_on_unit (whether f32 goes to a matrix unit where there is one), cache
 * sizes, CPU name, cores, memory, system. Works like snprintf: writes at most `size` bytes with the final 0 and sets
 * *needed (may be NULL) to the size of the whole text with its final 0. */
MH_API mh_status mh_machine_describe(char* buffer, size_t size, size_t* needed);

/* ---- The problem ---------------------------------------------------------------------------------------------- */

/* Where query row i stands among the keys: its position p is i + offset. Causal, windows and ALiBi use p. */
typedef enum mh_align {
  MH_ALIGN_UNSET = 0,        /* top left, allowed only where q_len == kv_len or no position is used */
  MH_ALIGN_TOP_LEFT = 1,     /* offset 0: torch's is_causal */
  MH_ALIGN_BOTTOM_RIGHT = 2, /* offset kv_len - q_len, with a batch entry's own kv_len: FlashAttention */
  MH_ALIGN_OFFSET = 3        /* offset q_offset, for chunked prefill; may be negative */
} mh_align;

typedef enum mh_alibi_mode {
  MH_ALIBI_ABS = 0,   /* adds -slope * |p - j| */
  MH_ALIBI_SIGNED = 1 /* adds  slope * (j - p) */
} mh_alibi_mode;

typedef enum mh_lse_base { MH_LSE_NATURAL = 0, MH_LSE_BASE2 = 1 } mh_lse_base;

/* Which scores MH_OUTPUT_SCORES writes. The first two are defined for every key, so they read keys behind seqused_k
 * too; attention itself does not. */
typedef enum mh_score_stage {
  MH_SCORES_RAW = 0,    /* scale * q k^T */
  MH_SCORES_CAPPED = 1, /* after the softcap */
  MH_SCORES_BIASED = 2  /* after softcap, ALiBi, bias and masks; masked slots are -inf */
} mh_score_stage;

typedef enum mh_index_type { MH_INDEX_I32 = 0, MH_INDEX_I64 = 1 } mh_index_type;

/* Bits of mh_problem.flags. */
#define MH_FLAG_SCALE 1u   /* take `scale` as it is, even 0; without it 0 means 1 / sqrt(head_dim) */
#define MH_FLAG_STRIDES 2u /* take all strides as they are; without it four zeros mean a contiguous array */
#define MH_FLAG_WINDOW 4u  /* window_left and window_right are used */
/* Exponentials may be wrong by 2^-13 of themselves instead of one unit in the last place, and where a matrix unit multiplies
 * f16 weights are rounded to bf16, or to f16 if it has that: prompts in f16 are up to 1.3 times as fast, in f32 on AMX 1.2.
 * Steps of up to 7 rows (query heads of a KV head times q_len), f64, and calls with outputs besides lse stay as exact as
 * without. */
#define MH_FLAG_FAST_EXP 8u

/* Bits of mh_problem.inputs: which optional inputs mh_tensors carries. */
#define MH_INPUT_MASK 1u      /* boolean, true (any non-zero byte) = may attend */
#define MH_INPUT_BIAS 2u      /* added to the scores; -inf = may not attend */
#define MH_INPUT_KEY_MASK 4u  /* boolean per batch entry and key, true = a real key */
#define MH_INPUT_SEQUSED_K 8u /* keys in use per batch entry; later ones are not looked at */
#define MH_INPUT_Q_OFFSET 16u /* an offset per batch entry (align is MH_ALIGN_OFFSET) */
#define MH_INPUT_ALIBI 32u    /* slopes */
#define MH_INPUT_SINKS 64u    /* one more logit per query head, in the softmax denominator only */

/* Bits of mh_problem.outputs: which optional outputs mh_tensors carries. */
#define MH_OUTPUT_LSE 1u          /* log of the softmax denominator, sink included */
#define MH_OUTPUT_WEIGHTS 2u      /* probabilities */
#define MH_OUTPUT_MEAN_WEIGHTS 4u /* probabilities averaged over the heads */
#define MH_OUTPUT_COLUMN_SUMS 8u  /* probabilities summed over the queries: what each key received */
#define MH_OUTPUT_SCORES 16u      /* see scores_stage */

typedef struct mh_problem {
  size_t struct_size;
  int64_t batch;
  int64_t heads;
  int64_t kv_heads; /* 0 = heads; must divide heads */
  int64_t q_len;
  int64_t kv_len;
  int64_t head_dim;
  int64_t v_dim;          /* 0 = head_dim */
  int32_t dtype;          /* mh_dtype of q, k, v and out */
  uint32_t flags;         /* MH_FLAG_* */
  uint32_t inputs;        /* MH_INPUT_* */
  uint32_t outputs;       /* MH_OUTPUT_* */
  int64_t q_strides[4];   /* [batch, heads, q_len, head_dim] */
  int64_t k_strides[4];   /* [batch, kv_heads, kv_len, head_dim] */
  int64_t v_strides[4];   /* [batch, kv_heads, kv_len, v_dim] */
  int64_t out_strides[4]; /* [batch, heads, q_len, v_dim] */
  double scale;
  double softcap;          /* cap * tanh(score / cap), before every mask and bias; 0 = off, else > 0 */
  int32_t causal;          /* 1: a row attends keys j <= p only */
  int32_t align;           /* mh_align */
  int64_t q_offset;        /* with MH_ALIGN_OFFSET and without MH_INPUT_Q_OFFSET */
  int64_t window_left;     /* keys j >= p - window_left; -1 = no bound. Needs MH_FLAG_WINDOW */
  int64_t window_right;    /* keys j <= p + window_right; -1 = no bound */
  int32_t alibi_mode;      /* mh_alibi_mode */
  int32_t lse_base;        /* mh_lse_base of the lse output */
  int32_t scores_stage;    /* mh_score_stage */
  int32_t bias_dtype;      /* mh_dtype of bias */
  int32_t index_type;      /* mh_index_type of seqused_k and q_offset */
  int32_t reserved0;       /* 0 */
  int64_t mask_strides[4]; /* [batch, heads, q_len, kv_len] in bytes = elements; 0 broadcasts. Four zeros: contiguous */
  int64_t bias_strides[4]; /* [batch, heads, q_len, kv_len] */
  int64_t key_mask_strides[2];     /* [batch, kv_len] */
  int64_t alibi_batch_stride;      /* slopes are [heads]: 0, or [batch, heads]: heads */
  int64_t lse_strides[3];          /* [batch, heads, q_len] */
  int64_t weights_strides[4];      /* [batch, heads, q_len, kv_len] */
  int64_t mean_weights_strides[3]; /* [batch, q_len, kv_len] */
  int64_t column_sums_strides[3];  /* [batch, heads, kv_len] */
  int64_t scores_strides[4];       /* [batch, heads, q_len, kv_len] */
} mh_problem;

/* The pointers of one run. Those of inputs and outputs that the problem does not name must be NULL. All memory stays
 * the caller's. Pointers are aligned as their element type asks. */
typedef struct mh_tensors {
  size_t struct_size;
  const void* q;
  const void* k;
  const void* v;
  void* out;
  const uint8_t* mask;
  const void* bias; /* bias_dtype; -inf hides a slot, finite f64 beyond the largest float counts as that float. Numbers
                       near the lowest of the arithmetic, up to -3.2965e38 (of f64 q: -1.7415e308), hide it from rows
                       that see other keys */
  const uint8_t* key_mask;
  const void* seqused_k;    /* int32 or int64 [batch], each 0..kv_len */
  const void* q_offset;     /* int32 or int64 [batch] */
  const void* alibi_slopes; /* real [heads] or [batch, heads] */
  const void* sinks;        /* real [heads], natural units, not scaled, not capped */
  void* lse;                /* real */
  void* weights;            /* real */
  void* mean_weights;       /* real */
  void* column_sums;        /* real */
  void* scores;             /* real */
} mh_tensors;

/* ---- How it is run -------------------------------------------------------------------------------------------- */

/* A host's own thread pool: calls fn(arg, i) once for each i in 0..n-1, in any order, on any threads, and returns when
 * all are done, to the thread that called it. n is at most mh_exec.threads. */
typedef void (*mh_task_fn)(void* arg, int64_t index);
typedef void (*mh_parallel_for_fn)(void* ctx, int64_t n, mh_task_fn fn, void* arg);

/* An OpenMP runtime that the process has loaded: functions that dlsym finds in libgomp, libomp and libiomp5, all four. For
 * bindings whose users' arrays belong to a library that computes on that runtime, as PyTorch does: its idle threads spin for
 * milliseconds after each call, on CPUs that other threads would have to share. (A host that is compiled with OpenMP itself
 * may write a mh_parallel_for_fn.) parallel(body, data, 0, 0) must call body(data) once on each thread of the calling thread's
 * team, the caller's being number 0, and return when all have. max_threads() is the size of that team; libraries that set
 * one for each thread may have a function of their own for it. The whole team wakes up even for fewer tasks. */
typedef void (*mh_openmp_parallel_fn)(void (*body)(void* data), void* data, unsigned threads, unsigned flags);
typedef int (*mh_openmp_number_fn)(void);

typedef struct mh_openmp {
  size_t struct_size;
  mh_openmp_parallel_fn parallel;  /* GOMP_parallel */
  mh_openmp_number_fn max_threads; /* omp_get_max_threads, or at::get_num_threads */
  mh_openmp_number_fn thread_num;  /* omp_get_thread_num */
  mh_openmp_number_fn num_threads; /* omp_get_num_threads */
} mh_openmp;

typedef struct mh_exec {
  size_t struct_size;
  /* Most threads for this call, and no more than a cap (mh_set_threads or MH_THREADS) allows; 0 = mh_threads(), 1 = serial, on
   * the calling thread alone. */
  int32_t threads;
  int32_t reserved0; /* 0 */
  mh_parallel_for_fn
      parallel_for; /* NULL = openmp's threads, else oneTBB's; those of the caller's arena, if that is smaller than oneTBB's default one */
  void* parallel_ctx;
  void* workspace;       /* NULL = manyhead's own memory; else 64-byte aligned, for one call at a time */
  size_t workspace_size; /* bytes, at least mh_plan_workspace_size(plan, threads) */
  /* NULL = none. Else the call runs on the team of this runtime instead of oneTBB's threads, on at most max_threads() of them
   * and at most `threads`; parallel_for must be NULL. On oneTBB's all the same: where the environment variable MH_OPENMP is 0
   * (a value other than 0 and 1 is reported as a bad MH_ISA is); in a forked process, where the runtime would wait for threads
   * that are gone; and for a while after the calling thread had to wait for a team whose CPUs others use. *openmp must not
   * change until the call returns. */
  const mh_openmp* openmp;
} mh_exec;

/* ---- Plan and run --------------------------------------------------------------------------------------------- */

typedef struct mh_plan mh_plan;

/* Checks the problem and decides how to compute it. The plan is immutable: any number of threads may run it at once.
 * Returns MH_INVALID_ARGUMENT, MH_UNSUPPORTED, MH_OUT_OF_MEMORY. *plan is set to NULL on errors. */
MH_API mh_status mh_plan_create(const mh_problem* problem, mh_plan** plan);
MH_API void mh_plan_destroy(mh_plan* plan); /* NULL is fine */

/* Bytes of workspace with which a run on at most `threads` threads (0 = mh_threads()) allocates nothing. 0 if plan is
 * NULL. */
MH_API size_t mh_plan_workspace_size(const mh_plan* plan, int32_t threads);

/* exec may be NULL. Besides wrong pointers, reports lengths and offsets outside their ranges, misaligned pointers,
 * outputs that overlap inputs, and a workspace that is too small. */
MH_API mh_status mh_plan_run(const mh_plan* plan, const mh_tensors* tensors, const mh_exec* exec);

/* mh_plan_create, mh_plan_run, mh_plan_destroy in one. */
MH_API mh_status mh_attention(const mh_problem* problem, const mh_tensors* tensors, const mh_exec* exec);

typedef enum mh_format { MH_FORMAT_LINE = 0, MH_FORMAT_JSON = 1 } mh_format;

/* The plan's decisions as text: the problem, kernel, isa, tile sizes, splits, tasks, workspace, FLOPs, bytes, share of
 * tiles skipped; the threads of a run with default settings, and the balance to expect of them: the load of the busiest
 * over the mean. Buffer as in mh_machine_describe. */
MH_API mh_status mh_plan_describe(const mh_plan* plan, int32_t format, char* buffer, size_t size, size_t* needed);

/* ---- Measuring ------------------------------------------------------------------------------------------------ */

/* Reads a problem from a line such as "f32 b1 h32/8 q2048 kv2048 d128 causal": what mh_plan_describe prints before ": "
 * and MH_VERBOSE logs. First a dtype (f32 f64 bf16 f16), then in any order
 *   b<batch> h<heads>[/<kv_heads>] q<q_len> kv<kv_len> d<head_dim> [v<v_dim>]
 *   [causal] [align=tl|br|off:<n>] [window=<left>,<right>] [softcap=<x>] [scale=<x>] [alibi|alibi=signed] [slopes=bh]
 *   [sinks] [mask] [bias|bias=<dtype>] [keymask] [lens] [offsets] [i64]    i64: lens and offsets are int64, else int32
 *   [fastexp] [lse|lse2] [weights] [meanw] [colsums] [scores=raw|capped|biased]
 *   [bshd]     q, k, v and out lie as [batch, length, heads, dim], else as [batch, heads, length, dim]
 *   [strided]  they lie in a way that a line cannot say, [extra=<n>] keys that the layer added: read as if not there
 * Set problem->struct_size = sizeof *problem before. The other fields are filled in as a caller does; mh_plan_create
 * checks them. MH_INVALID_ARGUMENT: the line is none; *column (may be NULL) is then where the word at fault begins,
 * from 0. MH_UNSUPPORTED: it says something that a struct of that size cannot. */
MH_API mh_status mh_problem_parse(const char* line, mh_problem* problem, size_t* column);

/* What the machine can do now, measured for so many seconds (> 0, at most 3600) with threads of the probe's own (1 to
 * 4096); not for use beside other work. isa: a name as in mh_isa_name, NULL = mh_isa_current(). MH_UNSUPPORTED: the CPU
 * lacks it; MH_OUT_OF_MEMORY: there is no room for the buffer or for so many threads.
 * mh_probe_arithmetic: FLOP/s of multiply-adds on the unit that kernels of that dtype use: vectors of f32 or f64 in
 * registers; for bf16 and f16 with a matrix unit for them ("amx" ...) that unit, from the first-level cache. Kernels of
 * f32 may exceed their rate with such a unit, which does six multiply-adds of theirs for one.
 * mh_probe_read: bytes/s of reading `bytes` (>= 1, in all) again and again, each thread its own part, in whole vectors.
 * mh_probe_clock: cycles/s of the core that runs the call. */
MH_API mh_status mh_probe_arithmetic(const char* isa, int32_t dtype, int32_t threads, double seconds, double* flops);
MH_API mh_status mh_probe_read(const char* isa, size_t bytes, int32_t threads, double seconds,
                               double* bytes_per_second);
MH_API mh_status mh_probe_clock(double seconds, double* hertz);

/* Runs the plan again and again, as mh_plan_run does, until the runs together have taken `seconds` (0 to 3600) or there
 * were `most` (>= 1) of them; at least once. times[i], i < *runs, gets the seconds of run i. */
MH_API mh_status mh_plan_measure(const mh_plan* plan, const mh_tensors* tensors, const mh_exec* exec, double seconds,
                                 int64_t most, double* times, int64_t* runs);

/* A profile of the calls of the process between begin and end: when each began, how long it took (without the checks of
 * its arguments), on how many threads, and what its time went into. One at a time; MH_INVALID_ARGUMENT where one is
 * running, or none to end.
 *
 * The phases, in seconds of all threads together: pack (Q, K, V brought into the order that kernels want), scores
 * (Q K^T), mask (what masks, biases, softcap, ALiBi do), softmax, values (P V), store, merge (of partial results),
 * weights (and scores, once a row is known), project (the layer's projections), idle (the call's threads times its seconds, less the
 * others). Some tasks are looked into and stand for the others; null where none was, or there was no room for some.
 *
 * Cost: memory is set aside at begin; calls take less than 1 % longer, none where no profile runs. For that, a call of
 * less than half a millisecond or so, but for the first 64 of a thread, is kept one time in "stands_for", by chance, and then
 * stands for so many; "calls_skipped" counts the others. A thread's phases, in the summary, are of all its calls.
 *
 * The environment variable MH_PROFILE=<file> profiles the whole process, and writes the trace to the file when the process
 * ends; "%p" in the name becomes its number. No other profile can then be taken. MH_VERBOSE=1 prints a line for each call to
 * stderr: its problem, time and kernel. */
#define MH_PROFILE_COUNTERS \
  1u /* hardware counters of up to 64 threads, from a thread's first task on, where
                                  the kernel allows: some open files for each */

typedef struct mh_profile_options {
  size_t struct_size;
  int64_t calls;     /* room for so many calls, 0 = 4096. Later ones are counted, not kept */
  int64_t tasks;     /* for so many of their tasks (of short ones, runs), 0 = 65536 */
  uint32_t flags;    /* MH_PROFILE_COUNTERS */
  int32_t reserved0; /* 0 */
} mh_profile_options;

/* options may be NULL. */
MH_API mh_status mh_profile_begin(const mh_profile_options* options);
/* Waits for calls that are running. Not to be called from a host's parallel_for. Until it returns, mh_profile_begin and
 * mh_profile_describe in other threads are errors. */
MH_API mh_status mh_profile_end(void);

typedef enum mh_profile_format {
  MH_PROFILE_SUMMARY = 0, /* JSON: calls and threads, with their phases, in seconds */
  MH_PROFILE_TRACE = 1 /* the JSON that Perfetto and Chrome's tracing read: calls, tasks, phases on their threads; the
                             summary under "manyhead" */
} mh_profile_format;

/* The profile that ended last, as text. Buffer as in mh_machine_describe. */
MH_API mh_status mh_profile_describe(int32_t format, char* buffer, size_t size, size_t* needed);

/* ---- Merging partial results ---------------------------------------------------------------------------------- */

/* Combines attention over disjoint sets of keys: lse = log(sum exp(lse_s)), out = sum out_s exp(lse_s - lse). A state
 * with lse -inf counts nothing, whatever its out holds. States are added in the order of their index. */
typedef struct mh_merge {
  size_t struct_size;
  int64_t states; /* >= 0; with none the result is out 0, lse -inf */
  int64_t batch;
  int64_t heads;
  int64_t q_len;
  int64_t v_dim;
  int32_t dtype;    /* mh_dtype of outs and out */
  uint32_t flags;   /* MH_FLAG_STRIDES */
  int32_t lse_base; /* mh_lse_base of lses and lse */
  int32_t reserved0;
  int64_t outs_strides[5]; /* [states, batch, heads, q_len, v_dim] */
  int64_t lses_strides[4]; /* [states, batch, heads, q_len] */
  int64_t out_strides[4];  /* [batch, heads, q_len, v_dim] */
  int64_t lse_strides[3];  /* [batch, heads, q_len] */
  const mh_exec* exec;     /* NULL = defaults; workspace is checked, but not used */
} mh_merge;

/* outs has dtype, lses and lse are real; lse may be NULL. Outputs may not overlap inputs. */
MH_API mh_status mh_merge_states(const mh_merge* merge, const void* outs, const void* lses, void* out, void* lse);

/* The same for two states a and b given apart; merge->states is 0 or 2, outs_strides[0] and lses_strides[0] are not
 * used. Here out and lse may be exactly out_a and lse_a with the same strides: state a is then updated in place. */
MH_API mh_status mh_merge_state(const mh_merge* merge, const void* out_a, const void* lse_a, const void* out_b,
                                const void* lse_b, void* out, void* lse);

/* ---- The multi-head layer ------------------------------------------------------------------------------------- */

/* How the weight matrices lie in memory where their strides are all zero. */
typedef enum mh_weight_layout {
  MH_WEIGHTS_OUT_IN = 0,  /* [heads * head_dim, in], y = x W^T + b: torch.nn.Linear */
  MH_WEIGHTS_IN_OUT = 1,  /* [in, heads * head_dim], y = x W + b */
  MH_WEIGHTS_PER_HEAD = 2 /* [heads][in, head_dim]: the textbook's W_q^h; w_o is [heads * v_dim, out] */
} mh_weight_layout;

/* The layer's sizes and weights, read once by mh_mha_create. Projections: q from x_q [.., embed_dim], k from x_k
 * [.., k_embed_dim], v from x_v [.., v_embed_dim]; the heads' results, concatenated, go through w_o to out_dim. */
typedef struct mh_mha_weights {
  size_t struct_size;
  int32_t dtype;  /* mh_dtype of the arrays here, of x and of out; a call's weights are real, its bias has bias_dtype */
  int32_t layout; /* mh_weight_layout */
  int64_t embed_dim;
  int64_t k_embed_dim; /* 0 = embed_dim */
  int64_t v_embed_dim; /* 0 = k_embed_dim */
  int64_t out_dim;     /* 0 = embed_dim */
  int64_t heads;
  int64_t kv_heads; /* 0 = heads */
  int64_t head_dim; /* 0 = embed_dim / heads, which must divide */
  int64_t v_dim;    /* 0 = head_dim */
  const void* w_q;
  const void* w_k;
  const void* w_v;
  const void* w_o;     /* NULL = no output projection: out is the concatenation, out_dim must be 0 or heads * v_dim */
  const void* in_proj; /* instead of w_q, w_k, w_v: the three [out, in] matrices one after another, MH_WEIGHTS_OUT_IN */
  const void* b_q;     /* each bias may be NULL: none. Contiguous */
  const void* b_k;
  const void* b_v;
  const void* b_o;
  const void* in_proj_bias; /* instead of b_q, b_k, b_v */
  const void* bias_k;       /* [kv_heads * head_dim]: one more, learned, key, attended by every row; NULL = none */
  const void* bias_v;       /* [kv_heads * v_dim], with bias_k */
  int32_t add_zero_attn;    /* 1: one more key and value of zeros, attended by every row */
  uint32_t flags;           /* MH_FLAG_SCALE, MH_FLAG_STRIDES */
  double scale;             /* as in mh_problem */
  int64_t w_q_strides[3];   /* [heads, head_dim, in]; so any layout can be given */
  int64_t w_k_strides[3];
  int64_t w_v_strides[3];
  int64_t w_o_strides[2]; /* [out, in] */
} mh_mha_weights;

typedef struct mh_mha mh_mha;

/* Packs a copy of the weights for the instruction set of now (mh_isa_current), which the layer then keeps, like a plan;
 * the caller's arrays are not needed afterwards. A layer is immutable and thread-safe. What a row of x is projected to
 * does not depend, to the bit, on the other rows of the call, on the batch, or on threads; with AMX, calls of 48 rows an
 * entry or more in f32 and 12 in f16 may differ from shorter ones in the last bits, and with BFMMLA calls of 8 in bf16.
 * There weights of 128 x 128 and more are kept twice: in 2.5 times their size in f32, 3 in f16, 2 in bf16. bf16 with AMX or
 * VDPBF16PS, and f16 where AMX has it, need neither. In 16 bits sums are of floats, and what is projected, the heads'
 * results and out are rounded: to infinities in f16 from 65520 on. A bad MH_ISA is reported here, as by mh_plan_create. */
MH_API mh_status mh_mha_create(const mh_mha_weights* weights, mh_mha** mha);
MH_API void mh_mha_destroy(mh_mha* mha);

/* One call of the layer. Masks and options mean what they mean in mh_problem; where there are bias_k, bias_v or zero
 * attention, they do not restrict the extra keys, and weights have those as their last columns. */
typedef struct mh_mha_call {
  size_t struct_size;
  int64_t batch;
  int64_t q_len;
  int64_t kv_len;
  int32_t causal;
  int32_t align;
  int64_t q_offset;
  uint32_t flags; /* MH_FLAG_STRIDES, MH_FLAG_WINDOW, MH_FLAG_FAST_EXP */
  int32_t bias_dtype;
  int32_t index_type;
  int32_t reserved0;
  int64_t window_left;
  int64_t window_right;
  double softcap;
  const void* x_q;         /* [batch, q_len, embed_dim] */
  const void* x_k;         /* [batch, kv_len, k_embed_dim]; NULL = x_q (self-attention, kv_len is q_len) */
  const void* x_v;         /* [batch, kv_len, v_embed_dim]; NULL = x_k */
  void* out;               /* [batch, q_len, out_dim] */
  const uint8_t* mask;     /* [batch, heads, q_len, kv_len], true = may attend; NULL = none */
  const void* bias;        /* [batch, heads, q_len, kv_len] */
  const uint8_t* key_mask; /* [batch, kv_len] */
  const void* seqused_k;   /* [batch] */
  const void* q_offsets;   /* [batch], with MH_ALIGN_OFFSET */
  void* weights;           /* real [batch, heads, q_len, kv_len + extra keys]; NULL = not wanted */
  void* mean_weights;      /* real [batch, q_len, kv_len + extra keys]; NULL = not wanted */
  int64_t x_q_strides[3];
  int64_t x_k_strides[3];
  int64_t x_v_strides[3];
  int64_t out_strides[3];
  int64_t mask_strides[4];
  int64_t bias_strides[4];
  int64_t key_mask_strides[2];
  int64_t weights_strides[4];
  int64_t mean_weights_strides[3];
} mh_mha_call;

/* exec->workspace is not used here: the layer keeps its projections in memory of its own. */
MH_API mh_status mh_mha_run(const mh_mha* mha, const mh_mha_call* call, const mh_exec* exec);

#ifdef __cplusplus
}
#endif

#endif /* MANYHEAD_MANYHEAD_H */
