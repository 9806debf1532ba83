/* A user's program in C99 that knows manyhead.h alone: the layout of its structs, what each function refuses and says,
 * that refused calls write nothing, and that a few small results are right. Run with a wrong MH_ISA, MH_THREADS or
 * MH_F32_UNIT in the environment it checks how that is reported instead. */
/* First and alone: it must stand on its own. */
/* clang-format off */
#include "manyhead/manyhead.h"
/* clang-format on */

#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- The layout of the public structs, on 64-bit machines -------------------------------------------------------- */

/* clang-format off */
#define SIZE(type, size) typedef char size_of_##type[sizeof(type) == (size) ? 1 : -1]
#define AT(type, field, offset) typedef char offset_of_##type##_##field[offsetof(type, field) == (offset) ? 1 : -1]
SIZE(mh_problem, 504);
AT(mh_problem, struct_size, 0); AT(mh_problem, batch, 8); AT(mh_problem, heads, 16); AT(mh_problem, kv_heads, 24);
AT(mh_problem, q_len, 32); AT(mh_problem, kv_len, 40); AT(mh_problem, head_dim, 48); AT(mh_problem, v_dim, 56);
AT(mh_problem, dtype, 64); AT(mh_problem, flags, 68); AT(mh_problem, inputs, 72); AT(mh_problem, outputs, 76);
AT(mh_problem, q_strides, 80); AT(mh_problem, k_strides, 112); AT(mh_problem, v_strides, 144);
AT(mh_problem, out_strides, 176); AT(mh_problem, scale, 208); AT(mh_problem, softcap, 216);
AT(mh_problem, causal, 224); AT(mh_problem, align, 228); AT(mh_problem, q_offset, 232);
AT(mh_problem, window_left, 240); AT(mh_problem, window_right, 248); AT(mh_problem, alibi_mode, 256);
AT(mh_problem, lse_base, 260); AT(mh_problem, scores_stage, 264); AT(mh_problem, bias_dtype, 268);
AT(mh_problem, index_type, 272); AT(mh_problem, reserved0, 276); AT(mh_problem, mask_strides, 280);
AT(mh_problem, bias_strides, 312); AT(mh_problem, key_mask_strides, 344); AT(mh_problem, alibi_batch_stride, 360);
AT(mh_problem, lse_strides, 368); AT(mh_problem, weights_strides, 392); AT(mh_problem, mean_weights_strides, 424);
AT(mh_problem, column_sums_strides, 448); AT(mh_problem, scores_strides, 472);
SIZE(mh_tensors, 136);
AT(mh_tensors, struct_size, 0); AT(mh_tensors, q, 8); AT(mh_tensors, k, 16); AT(mh_tensors, v, 24);
AT(mh_tensors, out, 32); AT(mh_tensors, mask, 40); AT(mh_tensors, bias, 48); AT(mh_tensors, key_mask, 56);
AT(mh_tensors, seqused_k, 64); AT(mh_tensors, q_offset, 72); AT(mh_tensors, alibi_slopes, 80);
AT(mh_tensors, sinks, 88); AT(mh_tensors, lse, 96); AT(mh_tensors, weights, 104); AT(mh_tensors, mean_weights, 112);
AT(mh_tensors, column_sums, 120); AT(mh_tensors, scores, 128);
SIZE(mh_exec, 56);
AT(mh_exec, struct_size, 0); AT(mh_exec, threads, 8); AT(mh_exec, reserved0, 12); AT(mh_exec, parallel_for, 16);
AT(mh_exec, parallel_ctx, 24); AT(mh_exec, workspace, 32); AT(mh_exec, workspace_size, 40);
AT(mh_exec, openmp, 48);
SIZE(mh_openmp, 40);
AT(mh_openmp, struct_size, 0); AT(mh_openmp, parallel, 8); AT(mh_openmp, max_threads, 16);
AT(mh_openmp, thread_num, 24); AT(mh_openmp, num_threads, 32);
SIZE(mh_merge, 200);
AT(mh_merge, struct_size, 0); AT(mh_merge, states, 8); AT(mh_merge, batch, 16); AT(mh_merge, heads, 24);
AT(mh_merge, q_len, 32); AT(mh_merge, v_dim, 40); AT(mh_merge, dtype, 48); AT(mh_merge, flags, 52);
AT(mh_merge, lse_base, 56); AT(mh_merge, reserved0, 60); AT(mh_merge, outs_strides, 64);
AT(mh_merge, lses_strides, 104); AT(mh_merge, out_strides, 136); AT(mh_merge, lse_strides, 168);
AT(mh_merge, exec, 192);
SIZE(mh_mha_weights, 280);
AT(mh_mha_weights, struct_size, 0); AT(mh_mha_weights, dtype, 8); AT(mh_mha_weights, layout, 12);
AT(mh_mha_weights, embed_dim, 16); AT(mh_mha_weights, k_embed_dim, 24); AT(mh_mha_weights, v_embed_dim, 32);
AT(mh_mha_weights, out_dim, 40); AT(mh_mha_weights, heads, 48); AT(mh_mha_weights, kv_heads, 56);
AT(mh_mha_weights, head_dim, 64); AT(mh_mha_weights, v_dim, 72); AT(mh_mha_weights, w_q, 80);
AT(mh_mha_weights, w_k, 88); AT(mh_mha_weights, w_v, 96); AT(mh_mha_weights, w_o, 104);
AT(mh_mha_weights, in_proj, 112); AT(mh_mha_weights, b_q, 120); AT(mh_mha_weights, b_k, 128);
AT(mh_mha_weights, b_v, 136); AT(mh_mha_weights, b_o, 144); AT(mh_mha_weights, in_proj_bias, 152);
AT(mh_mha_weights, bias_k, 160); AT(mh_mha_weights, bias_v, 168); AT(mh_mha_weights, add_zero_attn, 176);
AT(mh_mha_weights, flags, 180); AT(mh_mha_weights, scale, 184); AT(mh_mha_weights, w_q_strides, 192);
AT(mh_mha_weights, w_k_strides, 216); AT(mh_mha_weights, w_v_strides, 240); AT(mh_mha_weights, w_o_strides, 264);
SIZE(mh_profile_options, 32);
AT(mh_profile_options, struct_size, 0); AT(mh_profile_options, calls, 8); AT(mh_profile_options, tasks, 16);
AT(mh_profile_options, flags, 24); AT(mh_profile_options, reserved0, 28);
SIZE(mh_mha_call, 408);
AT(mh_mha_call, struct_size, 0); AT(mh_mha_call, batch, 8); AT(mh_mha_call, q_len, 16); AT(mh_mha_call, kv_len, 24);
AT(mh_mha_call, causal, 32); AT(mh_mha_call, align, 36); AT(mh_mha_call, q_offset, 40); AT(mh_mha_call, flags, 48);
AT(mh_mha_call, bias_dtype, 52); AT(mh_mha_call, index_type, 56); AT(mh_mha_call, reserved0, 60);
AT(mh_mha_call, window_left, 64); AT(mh_mha_call, window_right, 72); AT(mh_mha_call, softcap, 80);
AT(mh_mha_call, x_q, 88); AT(mh_mha_call, x_k, 96); AT(mh_mha_call, x_v, 104); AT(mh_mha_call, out, 112);
AT(mh_mha_call, mask, 120); AT(mh_mha_call, bias, 128); AT(mh_mha_call, key_mask, 136);
AT(mh_mha_call, seqused_k, 144); AT(mh_mha_call, q_offsets, 152); AT(mh_mha_call, weights, 160);
AT(mh_mha_call, mean_weights, 168); AT(mh_mha_call, x_q_strides, 176); AT(mh_mha_call, x_k_strides, 200);
AT(mh_mha_call, x_v_strides, 224); AT(mh_mha_call, out_strides, 248); AT(mh_mha_call, mask_strides, 272);
AT(mh_mha_call, bias_strides, 304); AT(mh_mha_call, key_mask_strides, 336); AT(mh_mha_call, weights_strides, 352);
AT(mh_mha_call, mean_weights_strides, 384);
/* clang-format on */

/* ---- Checks ------------------------------------------------------------------------------------------------------ */

static long checks, failures;

static void check_at(int line, int good, const char* what) {
  ++checks;
  if (good) return;
  ++failures;
  printf("line %d: %s; last error: \"%s\"\n", line, what, mh_last_error());
}
#define CHECK(condition) check_at(__LINE__, (condition) != 0, #condition)

/* The call failed with this status, and the text names the argument. */
static void check_refused(int line, mh_status got, mh_status expected, const char* word) {
  char what[512];
  snprintf(what, sizeof what, "status is %s, expected %s with \"%s\"", mh_status_name((int32_t)got),
           mh_status_name((int32_t)expected), word);
  check_at(line, got == expected && strstr(mh_last_error(), word) != NULL, what);
}
#define REFUSED(call, word) check_refused(__LINE__, call, MH_INVALID_ARGUMENT, word)
#define UNSUPPORTED(call, word) check_refused(__LINE__, call, MH_UNSUPPORTED, word)

static int is_near(double x, double expected) {
  if (isnan(expected)) return isnan(x);
  if (isinf(expected)) return x == expected;
  return fabs(x - expected) <= 2e-5 + 2e-5 * fabs(expected);
}

static uint32_t random_state = 1;
static float random_number(void) { /* -1..1 */
  random_state = random_state * 1664525u + 1013904223u;
  return (float)(int32_t)random_state / 2147483648.0f;
}
static void fill_random(float* x, int n) {
  int i;
  for (i = 0; i < n; ++i) x[i] = random_number();
}

/* ---- One problem with every input and output --------------------------------------------------------------------- */

enum { B = 2, H = 4, G = 2, M = 5, N = 7, D = 6, V = 3 };

static struct {
  float q[B * H * M * D], k[B * G * N * D], v[B * G * N * V], bias[B * H * M * N], slopes[B * H], sinks[H];
  uint8_t mask[B * H * M * N], key_mask[B * N];
  int32_t used[B], offset[B];
} in;

static struct {
  float out[B * H * M * V], lse[B * H * M], weights[B * H * M * N], mean[B * M * N], sums[B * H * N];
  float scores[B * H * M * N];
} to, expected;

static mh_problem p;
static mh_tensors t;

static void set_up(void) {
  int i;
  random_state = 1;
  fill_random(in.q, B * H * M * D);
  fill_random(in.k, B * G * N * D);
  fill_random(in.v, B * G * N * V);
  fill_random(in.bias, B * H * M * N);
  fill_random(in.slopes, B * H);
  fill_random(in.sinks, H);
  for (i = 0; i < B * H * M * N; ++i) in.mask[i] = i % 5 != 2;
  for (i = 0; i < B * N; ++i) in.key_mask[i] = i % 7 != 3;
  in.used[0] = 6;
  in.used[1] = 7;
  in.offset[0] = 2;
  in.offset[1] = -1; /* row 0 of the second batch entry stands before the first key */
  in.bias[3] = -INFINITY;
  memset(&to, 0xa5, sizeof to);

  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.batch = B;
  p.heads = H;
  p.kv_heads = G;
  p.q_len = M;
  p.kv_len = N;
  p.head_dim = D;
  p.v_dim = V;
  p.inputs = MH_INPUT_MASK | MH_INPUT_BIAS | MH_INPUT_KEY_MASK | MH_INPUT_SEQUSED_K | MH_INPUT_Q_OFFSET |
             MH_INPUT_ALIBI | MH_INPUT_SINKS;
  p.outputs = MH_OUTPUT_LSE | MH_OUTPUT_WEIGHTS | MH_OUTPUT_MEAN_WEIGHTS | MH_OUTPUT_COLUMN_SUMS | MH_OUTPUT_SCORES;
  p.align = MH_ALIGN_OFFSET;
  p.causal = 1;
  p.flags = MH_FLAG_WINDOW;
  p.window_left = 4;
  p.window_right = -1;
  p.softcap = 2;
  p.alibi_batch_stride = H;
  p.scores_stage = MH_SCORES_BIASED;

  memset(&t, 0, sizeof t);
  t.struct_size = sizeof t;
  t.q = in.q;
  t.k = in.k;
  t.v = in.v;
  t.out = to.out;
  t.mask = in.mask;
  t.bias = in.bias;
  t.key_mask = in.key_mask;
  t.seqused_k = in.used;
  t.q_offset = in.offset;
  t.alibi_slopes = in.slopes;
  t.sinks = in.sinks;
  t.lse = to.lse;
  t.weights = to.weights;
  t.mean_weights = to.mean;
  t.column_sums = to.sums;
  t.scores = to.scores;
}

/* The same without optional inputs and outputs; q_len differs from kv_len, so nothing may use positions. */
static void set_up_plain(void) {
  mh_tensors plain;
  set_up();
  p.inputs = p.outputs = p.flags = 0;
  p.align = p.causal = p.scores_stage = 0;
  p.window_left = p.window_right = p.alibi_batch_stride = 0;
  p.softcap = 0;
  memset(&plain, 0, sizeof plain);
  plain.struct_size = sizeof plain;
  plain.q = t.q;
  plain.k = t.k;
  plain.v = t.v;
  plain.out = t.out;
  t = plain;
}

static int untouched(void) {
  size_t i;
  for (i = 0; i < sizeof to; ++i) {
    if (((const unsigned char*)&to)[i] != 0xa5) return 0;
  }
  return 1;
}

/* Attention of p and the inputs in double, as manyhead.h reads; contiguous arrays; into expected. */
static void compute_expected(void) {
  int b, h, i, j, d;
  memset(&expected, 0, sizeof expected);
  for (b = 0; b < B; ++b) {
    for (h = 0; h < H; ++h) {
      for (i = 0; i < M; ++i) {
        const int row = (b * H + h) * M + i, g = b * G + h / (H / G);
        const double scale = p.scale != 0 ? p.scale : 1 / sqrt(D);
        const int used = p.inputs & MH_INPUT_SEQUSED_K ? in.used[b] : N;
        const int64_t position = i + (p.align != MH_ALIGN_OFFSET     ? (p.align == MH_ALIGN_BOTTOM_RIGHT ? used - M : 0)
                                      : p.inputs & MH_INPUT_Q_OFFSET ? in.offset[b]
                                                                     : p.q_offset);
        double s[N], top = -INFINITY, sum = 0, lse;
        for (j = 0; j < N; ++j) {
          const int key = row * N + j;
          double x = 0;
          int may = j < used;
          for (d = 0; d < D; ++d) x += (double)in.q[row * D + d] * in.k[(g * N + j) * D + d];
          x *= scale;
          if (p.softcap > 0) x = p.softcap * tanh(x / p.softcap);
          if (p.inputs & MH_INPUT_ALIBI) x -= in.slopes[b * H + h] * fabs((double)(position - j));
          if (p.inputs & MH_INPUT_BIAS) x += in.bias[key];
          if (p.inputs & MH_INPUT_MASK) may = may && in.mask[key];
          if (p.inputs & MH_INPUT_KEY_MASK) may = may && in.key_mask[b * N + j];
          if (p.causal) may = may && j <= position;
          if ((p.flags & MH_FLAG_WINDOW) && p.window_left >= 0) may = may && j >= position - p.window_left;
          if ((p.flags & MH_FLAG_WINDOW) && p.window_right >= 0) may = may && j <= position + p.window_right;
          s[j] = may ? x : -INFINITY;
          expected.scores[key] = (float)s[j];
          top = fmax(top, s[j]);
        }
        if (p.inputs & MH_INPUT_SINKS) {
          top = fmax(top, in.sinks[h]);
          sum = exp(in.sinks[h] - top);
        }
        for (j = 0; j < N; ++j) sum += s[j] == -INFINITY ? 0 : exp(s[j] - top);
        lse = sum > 0 ? top + log(sum) : -INFINITY;
        expected.lse[row] = (float)lse;
        for (j = 0; j < N; ++j) {
          const double weight = s[j] == -INFINITY ? 0 : exp(s[j] - lse);
          expected.weights[row * N + j] = (float)weight;
          expected.mean[(b * M + i) * N + j] += (float)(weight / (double)H);
          expected.sums[(b * H + h) * N + j] += (float)weight;
          for (d = 0; d < V; ++d) expected.out[row * V + d] += (float)(weight * in.v[(g * N + j) * V + d]);
        }
      }
    }
  }
}

static int all_near(const float* x, const float* y, int n) {
  int i;
  for (i = 0; i < n; ++i) {
    if (!is_near(x[i], y[i])) {
      printf("element %d is %.9g, expected %.9g\n", i, x[i], y[i]);
      return 0;
    }
  }
  return 1;
}

/* p is refused by everything that takes a problem. */
static void check_problem(int line, mh_status status, const char* word) {
  mh_plan* plan = (mh_plan*)&p;
  check_refused(line, mh_plan_create(&p, &plan), status, word);
  check_at(line, plan == NULL, "a failed mh_plan_create leaves NULL");
  check_refused(line, mh_attention(&p, &t, NULL), status, word);
  check_at(line, untouched(), "a refused call writes nothing");
}

/* p is fine, t or exec is refused by everything that runs. */
static void check_run(int line, const mh_tensors* tensors, const mh_exec* exec, mh_status status, const char* word) {
  mh_plan* plan = NULL;
  check_at(line, mh_plan_create(&p, &plan) == MH_OK, "mh_plan_create");
  check_refused(line, mh_plan_run(plan, tensors, exec), status, word);
  check_refused(line, mh_attention(&p, tensors, exec), status, word);
  check_at(line, untouched(), "a refused call writes nothing");
  mh_plan_destroy(plan);
}

#define BAD_PROBLEM(change, word)                       \
  do {                                                  \
    set_up();                                           \
    change;                                             \
    check_problem(__LINE__, MH_INVALID_ARGUMENT, word); \
  } while (0)
#define BAD_PLAIN_PROBLEM(change, word)                 \
  do {                                                  \
    set_up_plain();                                     \
    change;                                             \
    check_problem(__LINE__, MH_INVALID_ARGUMENT, word); \
  } while (0)
#define BAD_TENSORS(change, word)                             \
  do {                                                        \
    set_up();                                                 \
    change;                                                   \
    check_run(__LINE__, &t, NULL, MH_INVALID_ARGUMENT, word); \
  } while (0)

/* ---- What problems are refused ----------------------------------------------------------------------------------- */

static void test_problem_numbers(void) {
  const int64_t big = INT64_MAX, half = INT64_MAX / 2;
  set_up();
  REFUSED(mh_plan_create(&p, NULL), "plan is NULL");
  REFUSED(mh_attention(NULL, &t, NULL), "problem is NULL");
  {
    mh_plan* plan = (mh_plan*)&p;
    REFUSED(mh_plan_create(NULL, &plan), "problem is NULL");
    CHECK(plan == NULL);
  }
  BAD_PROBLEM(p.batch = -1, "batch is -1");
  BAD_PROBLEM(p.heads = 0, "heads is 0");
  BAD_PROBLEM(p.heads = -4, "heads is -4");
  BAD_PROBLEM(p.kv_heads = 3, "kv_heads is 3, must divide heads = 4");
  BAD_PROBLEM(p.kv_heads = 8, "kv_heads is 8, must divide heads = 4");
  BAD_PROBLEM(p.kv_heads = -2, "kv_heads is -2");
  BAD_PROBLEM(p.q_len = -5, "q_len is -5");
  BAD_PROBLEM(p.kv_len = INT64_MIN, "kv_len is -9223372036854775808");
  BAD_PROBLEM(p.head_dim = 0, "head_dim is 0");
  BAD_PROBLEM(p.v_dim = -1, "v_dim is -1");

  BAD_PROBLEM(p.batch = big, "batch = 9223372036854775807 x heads = 4");
  BAD_PROBLEM(p.heads = big - 1, "heads = 9223372036854775806");
  BAD_PROBLEM(p.q_len = half, "q_len = 4611686018427387903");
  BAD_PROBLEM(p.kv_len = half, "kv_len = 4611686018427387903");
  BAD_PROBLEM(p.head_dim = half, "q has shape");
  BAD_PROBLEM(p.v_dim = big, "v has shape");
  BAD_PROBLEM((p.batch = 0, p.head_dim = big), "q has shape"); /* empty, but too large all the same */
  BAD_PLAIN_PROBLEM((p.q_len = (int64_t)1 << 31, p.kv_len = (int64_t)1 << 31), "q_len = 2147483648");

  BAD_PROBLEM(p.dtype = 4, "dtype is 4");
  BAD_PROBLEM(p.dtype = -1, "dtype is -1");
  BAD_PROBLEM(p.bias_dtype = 17, "bias_dtype is 17");
  BAD_PROBLEM(p.causal = 2, "causal is 2");
  BAD_PROBLEM(p.align = 4, "align is 4");
  BAD_PROBLEM(p.align = -1, "align is -1");
  BAD_PROBLEM(p.alibi_mode = 2, "alibi_mode is 2");
  BAD_PROBLEM(p.lse_base = -1, "lse_base is -1");
  BAD_PROBLEM(p.scores_stage = 3, "scores_stage is 3");
  BAD_PROBLEM(p.index_type = 2, "index_type is 2");
  BAD_PROBLEM(p.reserved0 = 1, "reserved0 is 1");
  BAD_PROBLEM(p.flags |= 16u, "flags is");
  BAD_PROBLEM(p.inputs |= 128u, "inputs is");
  BAD_PROBLEM(p.outputs |= 0x80000000u, "outputs is");

  BAD_PROBLEM(p.scale = NAN, "scale is nan");
  BAD_PROBLEM(p.scale = INFINITY, "scale is inf");
  BAD_PROBLEM(p.scale = 1e39, "scale is 1e+39"); /* not a float */
  BAD_PROBLEM(p.softcap = -1, "softcap is -1");
  BAD_PROBLEM(p.softcap = NAN, "softcap is nan");
  BAD_PROBLEM(p.softcap = INFINITY, "softcap is inf");
  BAD_PROBLEM(p.softcap = 1e-60, "softcap is 1e-60");
}

static void test_problem_positions(void) {
  BAD_PROBLEM(p.align = MH_ALIGN_BOTTOM_RIGHT, "MH_ALIGN_OFFSET");
  BAD_PROBLEM(p.align = MH_ALIGN_UNSET, "MH_ALIGN_OFFSET");
  BAD_PROBLEM(p.q_offset = 3, "q_offset is 3");
  BAD_PROBLEM(p.window_left = -2, "window_left is -2");
  BAD_PROBLEM(p.window_right = -3, "window_right is -3");
  BAD_PROBLEM(p.window_left = INT64_MAX, "window_left is 9223372036854775807");
  BAD_PROBLEM(p.flags = 0, "MH_FLAG_WINDOW");
  BAD_PLAIN_PROBLEM(p.window_right = 3, "window_right is 3");
  BAD_PLAIN_PROBLEM(p.q_offset = 3, "q_offset is 3");
  BAD_PLAIN_PROBLEM((p.align = MH_ALIGN_OFFSET, p.q_offset = INT64_MAX), "q_offset is 9223372036854775807");
  BAD_PLAIN_PROBLEM(p.alibi_mode = MH_ALIBI_SIGNED, "MH_INPUT_ALIBI");
  BAD_PLAIN_PROBLEM(p.scores_stage = MH_SCORES_CAPPED, "MH_OUTPUT_SCORES");
  BAD_PLAIN_PROBLEM(p.lse_base = MH_LSE_BASE2, "MH_OUTPUT_LSE");
  BAD_PLAIN_PROBLEM(p.alibi_batch_stride = p.heads, "alibi_batch_stride is ");
  /* Where positions count, an unset alignment is refused by naming the two choices. */
  BAD_PLAIN_PROBLEM(p.causal = 1, "MH_ALIGN_TOP_LEFT or MH_ALIGN_BOTTOM_RIGHT");
  BAD_PLAIN_PROBLEM((p.flags = MH_FLAG_WINDOW, p.window_right = -1), "MH_ALIGN_TOP_LEFT or MH_ALIGN_BOTTOM_RIGHT");
  BAD_PLAIN_PROBLEM(p.inputs = MH_INPUT_ALIBI, "MH_ALIGN_TOP_LEFT or MH_ALIGN_BOTTOM_RIGHT");
  /* A window without bounds is no window. */
  set_up_plain();
  p.flags = MH_FLAG_WINDOW;
  p.window_left = p.window_right = -1;
  CHECK(mh_attention(&p, &t, NULL) == MH_OK);
}

static void set(int64_t* strides, int64_t a, int64_t b, int64_t c, int64_t d) {
  strides[0] = a;
  strides[1] = b;
  strides[2] = c;
  strides[3] = d;
}

static void test_problem_strides(void) {
  BAD_PROBLEM(p.q_strides[0] = INT64_MAX, "q_strides are [9223372036854775807, 0, 0, 0]");
  BAD_PROBLEM(p.k_strides[1] = INT64_MIN, "k_strides");
  BAD_PROBLEM(set(p.v_strides, (int64_t)1 << 60, (int64_t)1 << 60, (int64_t)1 << 60, 1), "v_strides");
  BAD_PROBLEM(p.mask_strides[2] = INT64_MAX / 3, "mask_strides");
  BAD_PROBLEM(p.bias_strides[3] = INT64_MAX / 6, "bias_strides");
  BAD_PROBLEM(p.key_mask_strides[1] = INT64_MIN, "key_mask_strides");
  BAD_PROBLEM(p.alibi_batch_stride = INT64_MAX, "alibi_slopes_strides");
  BAD_PROBLEM(p.lse_strides[0] = INT64_MIN / 2, "lse_strides");
  BAD_PROBLEM(p.weights_strides[0] = INT64_MAX / 4, "weights_strides");
  /* The stride of a dimension with one element says nothing. */
  set_up_plain();
  p.batch = 1;
  set(p.q_strides, INT64_MIN, M * D, D, 1);
  set(p.out_strides, INT64_MAX, M * V, V, 1);
  compute_expected();
  CHECK(mh_attention(&p, &t, NULL) == MH_OK);
  CHECK(all_near(to.out, expected.out, H * M * V));
  /* Outputs that overlap themselves. */
  BAD_PROBLEM(set(p.out_strides, 0, M * V, V, 1), "out_strides");
  BAD_PROBLEM(set(p.out_strides, H * M * V, M * V, V - 1, 1), "out_strides");
  BAD_PROBLEM(set(p.out_strides, H * M * V, M * V, -1, 1), "out_strides");
  BAD_PROBLEM(p.flags |= MH_FLAG_STRIDES, "out_strides are [0, 0, 0, 0]");
  BAD_PROBLEM(p.lse_strides[2] = 1, "lse_strides");
  BAD_PROBLEM(set(p.weights_strides, 1, 1, 1, 1), "weights_strides");
  BAD_PROBLEM(p.mean_weights_strides[0] = 3, "mean_weights_strides");
  BAD_PROBLEM(p.column_sums_strides[1] = 3, "column_sums_strides");
  BAD_PROBLEM(set(p.scores_strides, 0, 0, N, 1), "scores_strides");
}

/* ---- struct_size ------------------------------------------------------------------------------------------------- */

static void test_struct_size(void) {
  struct {
    mh_problem p;
    int64_t more[4];
  } newer;
  struct {
    mh_tensors t;
    void* more[2];
  } newer_tensors;
  mh_exec exec;
  BAD_PROBLEM(p.struct_size = 0, "problem.struct_size is 0");
  BAD_PROBLEM(p.struct_size = sizeof(void*), "problem.struct_size is 8");
  BAD_PROBLEM(p.struct_size = sizeof p - 1, "problem.struct_size");
  BAD_PROBLEM(p.struct_size = SIZE_MAX, "problem.struct_size");
  BAD_TENSORS(t.struct_size = 0, "tensors.struct_size is 0");
  BAD_TENSORS(t.struct_size = 8, "tensors.struct_size is 8");
  BAD_TENSORS(t.struct_size = (size_t)1 << 40, "tensors.struct_size");

  /* Newer than the library: zeros are defaults, anything else asks for what is not there. */
  set_up();
  memset(&newer, 0, sizeof newer);
  newer.p = p;
  newer.p.struct_size = sizeof newer;
  CHECK(mh_attention(&newer.p, &t, NULL) == MH_OK);
  set_up();
  newer.more[3] = 1;
  UNSUPPORTED(mh_attention(&newer.p, &t, NULL), "problem");
  memset(&newer_tensors, 0, sizeof newer_tensors);
  newer_tensors.t = t;
  newer_tensors.t.struct_size = sizeof newer_tensors;
  newer_tensors.more[0] = &p;
  UNSUPPORTED(mh_attention(&p, &newer_tensors.t, NULL), "tensors");
  CHECK(untouched());
  newer_tensors.more[0] = NULL;
  CHECK(mh_attention(&p, &newer_tensors.t, NULL) == MH_OK);

  /* Older: the fields that it lacks are zero, whatever stands in memory there. */
  set_up_plain();
  p.struct_size = offsetof(mh_problem, mask_strides);
  memset(p.mask_strides, 0x5a, sizeof p - p.struct_size);
  t.struct_size = offsetof(mh_tensors, mask);
  memset(&t.mask, 0x5a, sizeof t - t.struct_size);
  memset(&exec, 0x5a, sizeof exec);
  exec.struct_size = offsetof(mh_exec, parallel_for);
  exec.threads = 1;
  exec.reserved0 = 0;
  CHECK(mh_attention(&p, &t, &exec) == MH_OK);
  CHECK(!untouched());
}

/* ---- What tensors are refused ------------------------------------------------------------------------------------ */

static const void* odd(const void* pointer) { return (const char*)pointer + 1; }

static void test_tensors(void) {
  mh_plan* plan = NULL;
  set_up();
  REFUSED(mh_attention(&p, NULL, NULL), "tensors is NULL");
  REFUSED(mh_plan_run(NULL, &t, NULL), "plan is NULL");
  CHECK(mh_plan_create(&p, &plan) == MH_OK);
  REFUSED(mh_plan_run(plan, NULL, NULL), "tensors is NULL");
  mh_plan_destroy(plan);
  mh_plan_destroy(NULL);
  CHECK(untouched());

  BAD_TENSORS(t.q = NULL, "q is NULL");
  BAD_TENSORS(t.k = NULL, "k is NULL");
  BAD_TENSORS(t.v = NULL, "v is NULL");
  BAD_TENSORS(t.out = NULL, "out is NULL");
  BAD_TENSORS(t.mask = NULL, "mask is NULL");
  BAD_TENSORS(t.bias = NULL, "bias is NULL");
  BAD_TENSORS(t.key_mask = NULL, "key_mask is NULL");
  BAD_TENSORS(t.seqused_k = NULL, "seqused_k is NULL");
  BAD_TENSORS(t.q_offset = NULL, "q_offset is NULL");
  BAD_TENSORS(t.alibi_slopes = NULL, "alibi_slopes is NULL");
  BAD_TENSORS(t.sinks = NULL, "sinks is NULL");
  BAD_TENSORS(t.lse = NULL, "lse is NULL");
  BAD_TENSORS(t.weights = NULL, "weights is NULL");
  BAD_TENSORS(t.mean_weights = NULL, "mean_weights is NULL");
  BAD_TENSORS(t.column_sums = NULL, "column_sums is NULL");
  BAD_TENSORS(t.scores = NULL, "scores is NULL");

  BAD_TENSORS(p.inputs &= ~MH_INPUT_MASK, "MH_INPUT_MASK");
  BAD_TENSORS(p.inputs &= ~MH_INPUT_BIAS, "MH_INPUT_BIAS");
  BAD_TENSORS(p.inputs &= ~MH_INPUT_KEY_MASK, "MH_INPUT_KEY_MASK");
  BAD_TENSORS(p.inputs &= ~MH_INPUT_SEQUSED_K, "MH_INPUT_SEQUSED_K");
  BAD_TENSORS(p.inputs &= ~MH_INPUT_Q_OFFSET, "MH_INPUT_Q_OFFSET");
  BAD_TENSORS((p.inputs &= ~MH_INPUT_ALIBI, p.alibi_batch_stride = 0), "MH_INPUT_ALIBI");
  BAD_TENSORS(p.inputs &= ~MH_INPUT_SINKS, "MH_INPUT_SINKS");
  BAD_TENSORS(p.outputs &= ~MH_OUTPUT_LSE, "MH_OUTPUT_LSE");
  BAD_TENSORS(p.outputs &= ~MH_OUTPUT_WEIGHTS, "MH_OUTPUT_WEIGHTS");
  BAD_TENSORS(p.outputs &= ~MH_OUTPUT_MEAN_WEIGHTS, "MH_OUTPUT_MEAN_WEIGHTS");
  BAD_TENSORS(p.outputs &= ~MH_OUTPUT_COLUMN_SUMS, "MH_OUTPUT_COLUMN_SUMS");
  BAD_TENSORS((p.outputs &= ~MH_OUTPUT_SCORES, p.scores_stage = 0), "MH_OUTPUT_SCORES");

  BAD_TENSORS(t.q = odd(in.q), "q is at address");
  BAD_TENSORS(t.k = odd(in.k), "k is at address");
  BAD_TENSORS(t.v = odd(in.v), "v is at address");
  BAD_TENSORS(t.out = (char*)to.out + 2, "out is at address");
  BAD_TENSORS(t.bias = odd(in.bias), "bias is at address");
  BAD_TENSORS(t.seqused_k = odd(in.used), "seqused_k is at address");
  BAD_TENSORS(t.q_offset = odd(in.offset), "q_offset is at address");
  BAD_TENSORS(t.alibi_slopes = odd(in.slopes), "alibi_slopes is at address");
  BAD_TENSORS(t.sinks = odd(in.sinks), "sinks is at address");
  BAD_TENSORS(t.lse = (char*)to.lse + 1, "lse is at address");
  BAD_TENSORS(t.scores = (char*)to.scores + 3, "scores is at address");
  BAD_TENSORS((p.q_strides[0] = (int64_t)1 << 58, p.q_strides[3] = 1, t.q = (void*)(UINTPTR_MAX - 4095)),
              "q is at address");

  BAD_TENSORS(in.used[1] = 8, "seqused_k[1] is 8, must be 0..7");
  BAD_TENSORS(in.used[0] = -1, "seqused_k[0] is -1");
  {
    static int64_t wide[B] = {0, 0};
    BAD_TENSORS((p.index_type = MH_INDEX_I64, t.seqused_k = wide, t.q_offset = wide, wide[1] = INT64_MIN),
                "seqused_k[1] is -9223372036854775808");
    BAD_TENSORS((p.index_type = MH_INDEX_I64, t.seqused_k = wide, p.inputs &= ~MH_INPUT_SEQUSED_K, t.seqused_k = NULL,
                 t.q_offset = wide, wide[1] = INT64_MAX),
                "q_offset[1] is 9223372036854775807");
  }
}

static void test_overlaps(void) {
  float buffer[B * M * (2 * H + 2 * G) * D];
  int b, h, i, d, wrong = 0;
  BAD_TENSORS(t.out = in.q, "out overlaps q");
  BAD_TENSORS(t.out = in.k + B * G * N * D - 1, "out overlaps k");
  BAD_TENSORS(t.out = in.bias + 8, "out overlaps bias");
  BAD_TENSORS(t.lse = to.out + 1, "lse overlaps out");
  BAD_TENSORS(t.scores = to.weights, "scores overlaps weights");
  BAD_TENSORS(t.column_sums = in.sinks, "column_sums overlaps");
  BAD_TENSORS(t.mean_weights = in.v, "mean_weights overlaps v");
  BAD_TENSORS(t.q = to.out + B * H * M * V - 1, "out overlaps q");
  BAD_TENSORS(t.mask = (const uint8_t*)to.lse + 3, "lse overlaps mask");

  /* q, k, v and out as views of one packed buffer [batch, len, heads + kv_heads + kv_heads + heads, dim] share nothing.
   */
  set_up_plain();
  p.kv_len = M;
  p.v_dim = D;
  {
    const int64_t row = (2 * H + 2 * G) * D;
    set(p.q_strides, M * row, D, row, 1);
    set(p.k_strides, M * row, D, row, 1);
    set(p.v_strides, M * row, D, row, 1);
    set(p.out_strides, M * row, D, row, 1);
    fill_random(buffer, (int)(B * M * row));
    t.q = buffer;
    t.k = buffer + H * D;
    t.v = buffer + (H + G) * D;
    t.out = buffer + (H + 2 * G) * D;
    CHECK(mh_attention(&p, &t, NULL) == MH_OK);
    for (b = 0; b < B; ++b) {
      for (h = 0; h < H; ++h) {
        for (i = 0; i < M; ++i) { /* every out row lies between the smallest and the largest value of its head */
          for (d = 0; d < D; ++d) {
            const float x = ((float*)t.out)[b * M * row + i * row + h * D + d];
            float low = INFINITY, high = -INFINITY;
            int j;
            for (j = 0; j < M; ++j) {
              const float value = ((const float*)t.v)[b * M * row + j * row + h / (H / G) * D + d];
              low = fminf(low, value);
              high = fmaxf(high, value);
            }
            wrong += !(x >= low - 1e-6f && x <= high + 1e-6f);
          }
        }
      }
    }
    CHECK(wrong == 0);
    t.out = buffer + (H + 2 * G) * D - 1; /* one element into v */
    REFUSED(mh_attention(&p, &t, NULL), "out overlaps v");
  }

  /* Two outputs that take turns in one buffer. */
  {
    static float both[2 * B * H * M * N];
    set_up();
    set(p.weights_strides, 2 * H * M * N, 2 * M * N, 2 * N, 2);
    set(p.scores_strides, 2 * H * M * N, 2 * M * N, 2 * N, 2);
    t.weights = both;
    t.scores = both + 1;
    CHECK(mh_attention(&p, &t, NULL) == MH_OK);
    t.scores = both + 2;
    REFUSED(mh_attention(&p, &t, NULL), "scores overlaps weights");

    /* Bytes of a mask in the four bytes that each score leaves free, then in those of the scores. */
    t.scores = both;
    set(p.weights_strides, 0, 0, 0, 0);
    t.weights = to.weights;
    set(p.mask_strides, 8 * H * M * N, 8 * M * N, 8 * N, 8);
    t.mask = (const uint8_t*)both + 7;
    CHECK(mh_attention(&p, &t, NULL) == MH_OK);
    t.mask = (const uint8_t*)both + 3;
    REFUSED(mh_attention(&p, &t, NULL), "scores overlaps mask");
  }
}

/* After a test that forced others: what MH_ISA says, so that the rest of this program runs on it. */
static void use_asked_isa(void) { CHECK(mh_set_isa(getenv("MH_ISA")) == MH_OK); }

/* ---- Results ----------------------------------------------------------------------------------------------------- */

static void test_results(void) {
  int isa;
  for (isa = 0; isa < mh_isa_count(); ++isa) {
    if (!mh_isa_supported(isa)) continue;
    CHECK(mh_set_isa(mh_isa_name(isa)) == MH_OK);
    CHECK(strcmp(mh_isa_current(), mh_isa_name(isa)) == 0);

    set_up_plain();
    compute_expected();
    CHECK(mh_attention(&p, &t, NULL) == MH_OK);
    CHECK(all_near(to.out, expected.out, B * H * M * V));
    p.scale = 0.25;
    compute_expected();
    CHECK(mh_attention(&p, &t, NULL) == MH_OK);
    CHECK(all_near(to.out, expected.out, B * H * M * V));
    p.causal = 1;
    for (p.align = MH_ALIGN_TOP_LEFT; p.align <= MH_ALIGN_OFFSET; ++p.align) {
      p.q_offset = p.align == MH_ALIGN_OFFSET ? -3 : 0;
      compute_expected();
      CHECK(mh_attention(&p, &t, NULL) == MH_OK);
      CHECK(all_near(to.out, expected.out, B * H * M * V));
    }

    set_up();
    compute_expected();
    CHECK(mh_attention(&p, &t, NULL) == MH_OK);
    CHECK(all_near(to.out, expected.out, B * H * M * V));
    CHECK(all_near(to.lse, expected.lse, B * H * M));
    CHECK(all_near(to.weights, expected.weights, B * H * M * N));
    CHECK(all_near(to.mean, expected.mean, B * M * N));
    CHECK(all_near(to.sums, expected.sums, B * H * N));
    CHECK(all_near(to.scores, expected.scores, B * H * M * N));

    /* The caller's rounding mode stays, and does not change the result. */
    memset(&to, 0xa5, sizeof to);
    CHECK(fesetround(FE_UPWARD) == 0);
    CHECK(mh_attention(&p, &t, NULL) == MH_OK);
    CHECK(fegetround() == FE_UPWARD);
    fesetround(FE_TONEAREST);
    CHECK(all_near(to.out, expected.out, B * H * M * V));
  }
  use_asked_isa();
}

/* Strides of 0 make a small array of a problem whose scratch nobody has. */
static void test_too_large(void) {
  static float one[1], out[128];
  mh_plan* plan = NULL;
  size_t least;
  int i, bits;
  set_up_plain();
  p.flags |= MH_FLAG_STRIDES;
  p.batch = 64;
  p.heads = p.kv_heads = p.v_dim = 1;
  p.q_len = p.kv_len = 2;
  for (i = 0; i < 4; ++i) p.q_strides[i] = p.k_strides[i] = p.v_strides[i] = 0;
  p.out_strides[0] = 2;
  p.out_strides[1] = p.out_strides[2] = p.out_strides[3] = 1;
  t.q = t.k = t.v = one;
  t.out = out;
  for (bits = 47; bits < 53; ++bits) {
    p.head_dim = INT64_C(1) << bits;
    CHECK(mh_plan_create(&p, &plan) == MH_OK);
    least = mh_plan_workspace_size(plan, 1);
    CHECK(least >= (size_t)1 << 47);
    CHECK(mh_plan_workspace_size(plan, 64) >= least);
    CHECK(mh_plan_run(plan, &t, NULL) == MH_OUT_OF_MEMORY);
    mh_plan_destroy(plan);
  }
}

static void test_empty(void) {
  static float none[1];
  int i;
  /* No keys: k and v may be NULL, out is 0. */
  set_up_plain();
  p.kv_len = 0;
  t.k = t.v = NULL;
  p.outputs = MH_OUTPUT_LSE | MH_OUTPUT_WEIGHTS;
  t.lse = to.lse;
  t.weights = none;
  CHECK(mh_attention(&p, &t, NULL) == MH_OK);
  for (i = 0; i < B * H * M * V; ++i) {
    if (to.out[i] != 0) break;
  }
  CHECK(i == B * H * M * V);
  CHECK(to.lse[B * H * M - 1] == -INFINITY);
  /* No rows, no batch entries: nothing is written. */
  set_up_plain();
  p.q_len = 0;
  t.q = t.out = NULL;
  CHECK(mh_attention(&p, &t, NULL) == MH_OK);
  set_up_plain();
  p.batch = 0;
  t.q = t.k = t.v = t.out = NULL;
  CHECK(mh_attention(&p, &t, NULL) == MH_OK);
  CHECK(untouched());
}

/* ---- exec: threads, the host's pool, workspace ------------------------------------------------------------------- */

enum { BIG_H = 4, BIG_LEN = 300, BIG_D = 40, BIG = BIG_H * BIG_LEN * BIG_D };
static float big_q[BIG], big_k[BIG], big_v[BIG], big_out[BIG], big_serial[BIG];

static void set_up_big(void) {
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.batch = 1;
  p.heads = BIG_H;
  p.q_len = p.kv_len = BIG_LEN;
  p.head_dim = BIG_D;
  memset(&t, 0, sizeof t);
  t.struct_size = sizeof t;
  fill_random(big_q, BIG);
  fill_random(big_k, BIG);
  fill_random(big_v, BIG);
  memset(big_out, 0xa5, sizeof big_out);
  t.q = big_q;
  t.k = big_k;
  t.v = big_v;
  t.out = big_out;
}

static struct {
  long calls, tasks;
  int64_t most;
} pool;

/* A host's pool with one thread that works backwards. */
static void pool_run(void* ctx, int64_t n, mh_task_fn fn, void* arg) {
  int64_t i;
  CHECK(ctx == &pool);
  ++pool.calls;
  if (n > pool.most) pool.most = n;
  for (i = n; i-- > 0;) {
    ++pool.tasks;
    fn(arg, i);
  }
}

/* One whose thread does other calls of the host's in between. */
static void busy_pool_run(void* ctx, int64_t n, mh_task_fn fn, void* arg) {
  static float other_out[BIG];
  mh_problem other = p;
  mh_tensors tensors = t;
  int64_t i;
  (void)ctx;
  other.q_len = 1;
  other.heads = 1;
  other.kv_heads = 1;
  tensors.out = other_out;
  for (i = 0; i < n; ++i) {
    CHECK(mh_attention(&other, &tensors, NULL) == MH_OK);
    fn(arg, i);
  }
}

/* An OpenMP runtime with a team of up to three, the caller among them, whose others come one after the other. */
static struct {
  mh_openmp openmp;
  int most, team, number, calls;
  long late_ms; /* how much later than the caller's the last thread ends */
} runtime;

static int openmp_is_off; /* as MH_OPENMP says */

static void sleep_ms(long ms) {
  struct timespec time;
  time.tv_sec = ms / 1000;
  time.tv_nsec = ms % 1000 * 1000000;
  nanosleep(&time, NULL);
}

static int runtime_most(void) { return runtime.most; }
static int runtime_number(void) { return runtime.number; }
static int runtime_team(void) { return runtime.team; }

static void runtime_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  CHECK(threads == 0 && flags == 0); /* its own team, whatever its size */
  ++runtime.calls;
  for (runtime.number = runtime.team; runtime.number-- > 0;) body(data);
  if (runtime.late_ms > 0) sleep_ms(runtime.late_ms);
}

static void set_up_runtime(int most, int team) {
  memset(&runtime, 0, sizeof runtime);
  runtime.openmp.struct_size = sizeof runtime.openmp;
  runtime.openmp.parallel = runtime_parallel;
  runtime.openmp.max_threads = runtime_most;
  runtime.openmp.thread_num = runtime_number;
  runtime.openmp.num_threads = runtime_team;
  runtime.most = most;
  runtime.team = team;
}

static mh_exec default_exec(void) {
  mh_exec exec;
  memset(&exec, 0, sizeof exec);
  exec.struct_size = sizeof exec;
  return exec;
}

#define BAD_EXEC(change, word)                                \
  do {                                                        \
    mh_exec bad = default_exec();                             \
    set_up();                                                 \
    change;                                                   \
    check_run(__LINE__, &t, &bad, MH_INVALID_ARGUMENT, word); \
  } while (0)

static void test_exec(void) {
  static unsigned char memory[(1 << 22) + 192];
  unsigned char* aligned = memory + (64 - (uintptr_t)memory % 64) % 64;
  mh_exec exec = default_exec();
  mh_plan *plan = NULL, *step = NULL;
  size_t size, i;

  BAD_EXEC(bad.struct_size = 0, "exec.struct_size is 0");
  BAD_EXEC(bad.threads = -1, "threads is -1");
  BAD_EXEC(bad.reserved0 = 1, "reserved0 is 1");
  BAD_EXEC(bad.parallel_ctx = &pool, "parallel_for is NULL");
  set_up_runtime(3, 3);
  BAD_EXEC((bad.openmp = &runtime.openmp, bad.parallel_for = pool_run), "parallel_for is not NULL, must be NULL");
  BAD_EXEC((bad.openmp = &runtime.openmp, runtime.openmp.thread_num = NULL), "openmp has a function that is NULL");
  BAD_EXEC((bad.openmp = &runtime.openmp, runtime.openmp.struct_size = 8), "exec.openmp.struct_size is 8");
  BAD_EXEC((bad.workspace = aligned + 8, bad.workspace_size = 1 << 20), "workspace is at address");
  BAD_EXEC(bad.workspace_size = 1 << 20, "workspace is NULL");
  BAD_EXEC((bad.workspace = aligned, bad.workspace_size = 1), "workspace_size is 1");
  BAD_EXEC((bad.workspace = aligned, bad.workspace_size = SIZE_MAX), "workspace");
  BAD_EXEC((bad.workspace = aligned, bad.workspace_size = 1 << 20, t.q = (float*)(void*)aligned + 64),
           "workspace overlaps q");

  /* The host's pool runs the tasks; the result has the same bits as a serial one. */
  set_up_big();
  CHECK(mh_plan_create(&p, &plan) == MH_OK);
  exec.threads = 1;
  CHECK(mh_plan_run(plan, &t, &exec) == MH_OK);
  memcpy(big_serial, big_out, sizeof big_out);
  memset(big_out, 0xa5, sizeof big_out);
  exec.threads = 3;
  exec.parallel_for = pool_run;
  exec.parallel_ctx = &pool;
  CHECK(mh_plan_run(plan, &t, &exec) == MH_OK);
  CHECK(memcmp(big_serial, big_out, sizeof big_out) == 0);
  CHECK(pool.calls >= 1 && pool.tasks >= 2 && pool.most >= 2 && pool.most <= 3);
  memset(big_out, 0xa5, sizeof big_out);
  exec.parallel_for = busy_pool_run;
  CHECK(mh_attention(&p, &t, &exec) == MH_OK);
  CHECK(memcmp(big_serial, big_out, sizeof big_out) == 0);
  exec.parallel_for = pool_run;
  exec.threads = 1; /* serial: on this thread, without the pool */
  pool.calls = 0;
  CHECK(mh_plan_run(plan, &t, &exec) == MH_OK);
  CHECK(pool.calls == 0);

  /* So do the threads of an OpenMP runtime: all that it may have, fewer than it said, and one alone. */
  exec = default_exec();
  exec.openmp = &runtime.openmp;
  for (i = 3; i > 0; --i) {
    exec.threads = 4;
    memset(big_out, 0xa5, sizeof big_out);
    set_up_runtime(3, (int)i);
    CHECK(mh_plan_run(plan, &t, &exec) == MH_OK);
    CHECK(memcmp(big_serial, big_out, sizeof big_out) == 0);
    CHECK(openmp_is_off ? runtime.calls == 0 : runtime.calls >= 1);
    set_up_runtime((int)i, (int)i);
    exec.threads = i == 2 ? 1 : 2;
    CHECK(mh_plan_run(plan, &t, &exec) == MH_OK);
    CHECK(i == 3 && !openmp_is_off ? runtime.calls >= 1 : runtime.calls == 0);
  }

  /* A caller that had to wait for the team's last thread leaves it alone as long as it waited. Calls of one row, which take
   * far less, with sanitizers and emulators, too. */
  p.q_len = 1;
  CHECK(mh_plan_create(&p, &step) == MH_OK);
  set_up_runtime(2, 2);
  runtime.late_ms = 1000;
  for (i = 0; i < 3; ++i) {
    CHECK(mh_plan_run(step, &t, &exec) == MH_OK);
    CHECK(runtime.calls == (openmp_is_off ? 0 : 1));
  }
  runtime.late_ms = 0;
  for (i = 0; i < 100 && runtime.calls == 1; ++i) {
    sleep_ms(100);
    CHECK(mh_plan_run(step, &t, &exec) == MH_OK);
  }
  CHECK(runtime.calls == (openmp_is_off ? 0 : 2));
  mh_plan_destroy(step);

  /* manyhead's own threads, and a workspace of exactly the size asked for. */
  exec = default_exec();
  exec.threads = 2;
  size = mh_plan_workspace_size(plan, 2);
  CHECK(size > 0 && size <= sizeof memory - 128);
  CHECK(mh_plan_workspace_size(plan, 1) <= size);
  CHECK(mh_plan_workspace_size(NULL, 1) == 0);
  memset(memory, 0x5a, sizeof memory);
  memset(big_out, 0xa5, sizeof big_out);
  exec.workspace = aligned;
  exec.workspace_size = size;
  CHECK(mh_plan_run(plan, &t, &exec) == MH_OK);
  CHECK(memcmp(big_serial, big_out, sizeof big_out) == 0);
  for (i = 0; i < 64; ++i) {
    if (aligned[size + i] != 0x5a) break;
  }
  CHECK(i == 64);
  exec.workspace_size = size - 1;
  memset(big_out, 0xa5, sizeof big_out);
  REFUSED(mh_plan_run(plan, &t, &exec), "workspace_size");
  for (i = 0; i < sizeof big_out; ++i) {
    if (((unsigned char*)big_out)[i] != 0xa5) break;
  }
  CHECK(i == sizeof big_out);
  mh_plan_destroy(plan);
}

struct caller {
  const mh_plan* plan;
  float out[BIG];
  int good;
};

static void* call_many_times(void* arg) {
  struct caller* c = (struct caller*)arg;
  mh_tensors mine = t;
  int i;
  mine.out = c->out;
  c->good = mh_last_error()[0] == 0; /* each thread has its own text */
  for (i = 0; i < 5; ++i) {
    memset(c->out, 0xa5, sizeof c->out);
    c->good = c->good && mh_plan_run(c->plan, &mine, NULL) == MH_OK && memcmp(c->out, big_serial, sizeof c->out) == 0;
  }
  c->good = c->good && mh_plan_run(NULL, &mine, NULL) == MH_INVALID_ARGUMENT;
  return NULL;
}

static void test_callers(void) {
  static struct caller callers[3];
  pthread_t threads[3];
  mh_plan* plan = NULL;
  int i;
  set_up_big();
  CHECK(mh_plan_create(&p, &plan) == MH_OK);
  CHECK(mh_plan_run(plan, &t, NULL) == MH_OK);
  memcpy(big_serial, big_out, sizeof big_out);
  REFUSED(mh_set_isa("this thread's error"), "this thread's error");
  for (i = 0; i < 3; ++i) {
    callers[i].plan = plan;
    CHECK(pthread_create(&threads[i], NULL, call_many_times, &callers[i]) == 0);
  }
  for (i = 0; i < 3; ++i) {
    pthread_join(threads[i], NULL);
    CHECK(callers[i].good);
  }
  CHECK(strstr(mh_last_error(), "this thread's error") != NULL);
  mh_plan_destroy(plan);
}

/* ---- Texts, the machine ------------------------------------------------------------------------------------------ */

static void test_describe(void) {
  char text[4096], cut[16];
  size_t needed = 0, again = 0;
  mh_plan* plan = NULL;
  const char* line =
      "f32 b2 h4/2 q5 kv7 d6 v3 causal window=4,-1 softcap=2 alibi slopes=bh sinks mask bias keymask lens "
      "offsets lse weights meanw colsums scores=biased";
  set_up();
  CHECK(mh_plan_create(&p, &plan) == MH_OK);
  CHECK(mh_plan_describe(plan, MH_FORMAT_LINE, NULL, 0, &needed) == MH_OK);
  CHECK(needed > strlen(line) && needed < sizeof text);
  CHECK(mh_plan_describe(plan, MH_FORMAT_LINE, text, sizeof text, &again) == MH_OK);
  CHECK(again == needed && strlen(text) + 1 == needed);
  CHECK(strncmp(text, line, strlen(line)) == 0);
  CHECK(strstr(text, mh_isa_current()) != NULL);
  CHECK(mh_plan_describe(plan, MH_FORMAT_LINE, cut, sizeof cut, NULL) == MH_OK); /* cut off like snprintf */
  CHECK(strlen(cut) == sizeof cut - 1 && strncmp(cut, text, sizeof cut - 1) == 0);
  CHECK(mh_plan_describe(plan, MH_FORMAT_JSON, text, sizeof text, &needed) == MH_OK);
  CHECK(text[0] == '{' && text[needed - 2] == '}' && strstr(text, "\"isa\"") != NULL);
  CHECK(mh_plan_describe(plan, MH_FORMAT_JSON, NULL, 0, NULL) == MH_OK);
  REFUSED(mh_plan_describe(plan, 2, text, sizeof text, NULL), "format is 2");
  REFUSED(mh_plan_describe(plan, MH_FORMAT_LINE, NULL, 5, NULL), "buffer is NULL");
  REFUSED(mh_plan_describe(NULL, MH_FORMAT_LINE, text, sizeof text, NULL), "plan is NULL");
  mh_plan_destroy(plan);

  CHECK(mh_machine_describe(text, sizeof text, &needed) == MH_OK);
  CHECK(strlen(text) + 1 == needed && text[0] == '{' && text[needed - 2] == '}');
  CHECK(strstr(text, "\"threads\"") != NULL && strstr(text, "\"l2_bytes\"") != NULL && strstr(text, "\"cpu\"") != NULL);
  CHECK(mh_machine_describe(cut, 1, NULL) == MH_OK && cut[0] == 0);
  REFUSED(mh_machine_describe(NULL, 1, NULL), "buffer is NULL");
}

static void test_names(void) {
  char version[32];
  int i;
  snprintf(version, sizeof version, "%d.%d.%d", MH_VERSION_MAJOR, MH_VERSION_MINOR, MH_VERSION_PATCH);
  CHECK(strcmp(mh_version(), version) == 0);
  CHECK(mh_version_number() == MH_VERSION_MAJOR * 10000 + MH_VERSION_MINOR * 100 + MH_VERSION_PATCH);
  CHECK(mh_dtype_count() == 4);
  CHECK(strcmp(mh_dtype_name(MH_DTYPE_F32), "f32") == 0 && mh_dtype_size(MH_DTYPE_F32) == 4);
  CHECK(strcmp(mh_dtype_name(MH_DTYPE_F64), "f64") == 0 && mh_dtype_size(MH_DTYPE_F64) == 8);
  CHECK(strcmp(mh_dtype_name(MH_DTYPE_BF16), "bf16") == 0 && mh_dtype_size(MH_DTYPE_BF16) == 2);
  CHECK(strcmp(mh_dtype_name(MH_DTYPE_F16), "f16") == 0 && mh_dtype_size(MH_DTYPE_F16) == 2);
  CHECK(mh_dtype_name(4) == NULL && mh_dtype_name(-1) == NULL && mh_dtype_size(4) == 0 && mh_dtype_size(-1) == 0);
  CHECK(strcmp(mh_status_name(MH_OK), "MH_OK") == 0);
  CHECK(strcmp(mh_status_name(MH_INVALID_ARGUMENT), "MH_INVALID_ARGUMENT") == 0);
  CHECK(strcmp(mh_status_name(MH_UNSUPPORTED), "MH_UNSUPPORTED") == 0);
  CHECK(strcmp(mh_status_name(MH_OUT_OF_MEMORY), "MH_OUT_OF_MEMORY") == 0);
  CHECK(strcmp(mh_status_name(MH_INTERNAL_ERROR), "MH_INTERNAL_ERROR") == 0);
  CHECK(strcmp(mh_status_name(99), "unknown") == 0 && strcmp(mh_status_name(-1), "unknown") == 0);
  for (i = 0; i < mh_isa_count(); ++i) CHECK(mh_isa_name(i) != NULL);
  CHECK(mh_isa_count() >= 1 && mh_isa_name(-1) == NULL && mh_isa_name(mh_isa_count()) == NULL);
  CHECK(mh_isa_supported(-1) == 0 && mh_isa_supported(mh_isa_count()) == 0);
}

static void test_isa_and_threads(void) {
  const char* best = NULL;
  const char* asked = getenv("MH_ISA");
  int32_t i, all;
  if (asked != NULL && *asked != 0) CHECK(mh_isa_current() != NULL && strcmp(mh_isa_current(), asked) == 0);
  for (i = 0; i < mh_isa_count(); ++i) {
    if (mh_isa_supported(i)) {
      if (best == NULL) best = mh_isa_name(i);
      CHECK(mh_set_isa(mh_isa_name(i)) == MH_OK && strcmp(mh_isa_current(), mh_isa_name(i)) == 0);
    } else {
      UNSUPPORTED(mh_set_isa(mh_isa_name(i)), mh_isa_name(i));
    }
  }
  REFUSED(mh_set_isa("itanium"), "itanium");
  CHECK(best != NULL);
  CHECK(mh_set_isa("") == MH_OK && strcmp(mh_isa_current(), best) == 0);
  CHECK(mh_set_isa(NULL) == MH_OK && strcmp(mh_isa_current(), best) == 0);
  use_asked_isa();

  all = mh_threads();
  CHECK(all >= 1);
  CHECK(mh_set_threads(3) == MH_OK && mh_threads() == 3);
  REFUSED(mh_set_threads(-1), "threads is -1");
  CHECK(mh_threads() == 3);
  CHECK(mh_set_threads(0) == MH_OK && mh_threads() >= 1);
  if (getenv("MH_THREADS") == NULL) CHECK(mh_threads() == all);
}

/* ---- Merging ----------------------------------------------------------------------------------------------------- */

enum { STATES = 3, MB = 2, MH = 2, MM = 3, MV = 5, ROWS = MB * MH * MM };

static struct {
  float outs[STATES * ROWS * MV], lses[STATES * ROWS];
} states;
static struct {
  float out[ROWS * MV], lse[ROWS];
} merged, merged_expected;
static mh_merge merge;

static void set_up_merge(void) {
  memset(&merge, 0, sizeof merge);
  merge.struct_size = sizeof merge;
  merge.states = STATES;
  merge.batch = MB;
  merge.heads = MH;
  merge.q_len = MM;
  merge.v_dim = MV;
  random_state = 5;
  fill_random(states.outs, STATES * ROWS * MV);
  fill_random(states.lses, STATES * ROWS);
  states.lses[0] = -INFINITY; /* a state without keys, with rubbish in it */
  states.outs[0] = NAN;
  states.lses[1] = states.lses[ROWS + 1] = states.lses[2 * ROWS + 1] = -INFINITY;
  memset(&merged, 0xa5, sizeof merged);
}

static void compute_merged(int first, int count, double base) {
  int row, s, d;
  for (row = 0; row < ROWS; ++row) {
    double sum = 0, out[MV] = {0};
    for (s = first; s < first + count; ++s) {
      const double lse = states.lses[s * ROWS + row];
      if (lse == -INFINITY) continue;
      sum += pow(base, lse);
      for (d = 0; d < MV; ++d) out[d] += pow(base, lse) * states.outs[(s * ROWS + row) * MV + d];
    }
    merged_expected.lse[row] = sum > 0 ? (float)(log(sum) / log(base)) : -INFINITY;
    for (d = 0; d < MV; ++d) merged_expected.out[row * MV + d] = sum > 0 ? (float)(out[d] / sum) : 0;
  }
}

static int merged_is_right(void) {
  return all_near(merged.out, merged_expected.out, ROWS * MV) && all_near(merged.lse, merged_expected.lse, ROWS);
}

static int merged_untouched(void) {
  size_t i;
  for (i = 0; i < sizeof merged; ++i) {
    if (((unsigned char*)&merged)[i] != 0xa5) return 0;
  }
  return 1;
}

#define BAD_MERGE(change, word)                                                               \
  do {                                                                                        \
    set_up_merge();                                                                           \
    change;                                                                                   \
    REFUSED(mh_merge_states(&merge, states.outs, states.lses, merged.out, merged.lse), word); \
    CHECK(merged_untouched());                                                                \
  } while (0)

/* On the threads that merge.exec names, with the same bits. */
static void test_merge_exec(void) {
  enum { MANY = 2, LONG = 1000, DIM = 40, ALL = MANY * LONG * DIM };
  static float outs[MANY * ALL], lses[MANY * MANY * LONG], serial[ALL], out[ALL];
  mh_exec exec = default_exec();
  set_up_merge();
  merge.states = 2;
  merge.batch = 1;
  merge.heads = MANY;
  merge.q_len = LONG;
  merge.v_dim = DIM;
  fill_random(outs, MANY * ALL);
  fill_random(lses, MANY * MANY * LONG);
  merge.exec = &exec;
  exec.threads = 1;
  CHECK(mh_merge_states(&merge, outs, lses, serial, NULL) == MH_OK);
  exec.threads = 2;
  exec.parallel_for = pool_run;
  exec.parallel_ctx = &pool;
  pool.calls = 0;
  CHECK(mh_merge_states(&merge, outs, lses, out, NULL) == MH_OK);
  CHECK(pool.calls == 1 && memcmp(out, serial, sizeof out) == 0);
  memset(out, 0xa5, sizeof out);
  CHECK(mh_merge_state(&merge, outs, lses, outs + ALL, lses + MANY * LONG, out, NULL) == MH_OK);
  CHECK(pool.calls == 2 && memcmp(out, serial, sizeof out) == 0);
  merge.struct_size = offsetof(mh_merge, exec); /* of a header before there was one */
  CHECK(mh_merge_states(&merge, outs, lses, out, NULL) == MH_OK);
  CHECK(pool.calls == 2 && memcmp(out, serial, sizeof out) == 0);
}

static void test_merge(void) {
  const double e = exp(1.0);
  mh_exec bad = default_exec();
  bad.threads = -1;
  float* out_b = states.outs + 2 * ROWS * MV;
  float* lse_b = states.lses + 2 * ROWS;
  BAD_MERGE(merge.struct_size = 0, "merge.struct_size is 0");
  BAD_MERGE(merge.states = -1, "states is -1");
  BAD_MERGE(merge.batch = -1, "batch is -1");
  BAD_MERGE(merge.heads = 0, "heads is 0");
  BAD_MERGE(merge.q_len = -2, "q_len is -2");
  BAD_MERGE(merge.v_dim = 0, "v_dim is 0");
  BAD_MERGE(merge.v_dim = INT64_MAX / 2, "out has shape");
  BAD_MERGE(merge.states = INT64_MAX / 8, "outs has shape");
  BAD_MERGE(merge.dtype = 9, "dtype is 9");
  BAD_MERGE(merge.flags = MH_FLAG_SCALE, "flags is 1");
  BAD_MERGE(merge.lse_base = 2, "lse_base is 2");
  BAD_MERGE(merge.reserved0 = 2, "reserved0 is 2");
  BAD_MERGE(merge.exec = &bad, "exec.threads is -1");
  BAD_MERGE(merge.outs_strides[0] = INT64_MAX / 2, "outs_strides");
  BAD_MERGE(merge.lses_strides[3] = INT64_MIN, "lses_strides");
  BAD_MERGE(merge.out_strides[3] = 1, "out_strides");
  BAD_MERGE(merge.lse_strides[0] = 1, "lse_strides");
  BAD_MERGE(merge.flags = MH_FLAG_STRIDES, "out_strides");
  set_up_merge();
  REFUSED(mh_merge_states(NULL, states.outs, states.lses, merged.out, merged.lse), "merge is NULL");
  REFUSED(mh_merge_states(&merge, NULL, states.lses, merged.out, merged.lse), "outs is NULL");
  REFUSED(mh_merge_states(&merge, states.outs, NULL, merged.out, merged.lse), "lses is NULL");
  REFUSED(mh_merge_states(&merge, states.outs, states.lses, NULL, merged.lse), "out is NULL");
  REFUSED(mh_merge_states(&merge, odd(states.outs), states.lses, merged.out, merged.lse), "outs is at address");
  REFUSED(mh_merge_states(&merge, states.outs, states.lses, merged.out, (void*)odd(merged.lse)), "lse is at address");
  REFUSED(mh_merge_states(&merge, states.outs, states.lses, merged.out, merged.out + 3), "out overlaps lse");
  REFUSED(mh_merge_states(&merge, states.outs, states.lses, states.outs, merged.lse), "out overlaps outs");
  REFUSED(mh_merge_states(&merge, states.outs, states.lses, merged.out, states.lses + 4), "lse overlaps lses");
  CHECK(merged_untouched());

  set_up_merge();
  compute_merged(0, STATES, e);
  CHECK(mh_merge_states(&merge, states.outs, states.lses, merged.out, merged.lse) == MH_OK);
  CHECK(merged_is_right());
  compute_merged(0, STATES, 2);
  merge.lse_base = MH_LSE_BASE2;
  CHECK(mh_merge_states(&merge, states.outs, states.lses, merged.out, merged.lse) == MH_OK);
  CHECK(merged_is_right());
  memset(merged.out, 0xa5, sizeof merged.out);
  CHECK(mh_merge_states(&merge, states.outs, states.lses, merged.out, NULL) == MH_OK); /* lse not wanted */
  CHECK(merged_is_right());
  merge.states = 0;
  compute_merged(0, 0, e);
  CHECK(mh_merge_states(&merge, NULL, NULL, merged.out, merged.lse) == MH_OK);
  CHECK(merged_is_right());
  set_up_merge();
  merge.q_len = 0;
  CHECK(mh_merge_states(&merge, NULL, NULL, NULL, NULL) == MH_OK);
  CHECK(merged_untouched());

  /* Two states given apart, the first one also in place. */
  set_up_merge();
  merge.states = 0;
  compute_merged(1, 2, e);
  CHECK(mh_merge_state(&merge, states.outs + ROWS * MV, states.lses + ROWS, out_b, lse_b, merged.out, merged.lse) ==
        MH_OK);
  CHECK(merged_is_right());
  merge.states = 2;
  memcpy(merged.out, states.outs + ROWS * MV, sizeof merged.out);
  memcpy(merged.lse, states.lses + ROWS, sizeof merged.lse);
  CHECK(mh_merge_state(&merge, merged.out, merged.lse, out_b, lse_b, merged.out, merged.lse) == MH_OK);
  CHECK(merged_is_right());
  memset(&merged, 0xa5, sizeof merged);
  REFUSED(mh_merge_state(&merge, states.outs, states.lses, merged.out, lse_b, merged.out, merged.lse),
          "out overlaps out_b");
  REFUSED(mh_merge_state(&merge, merged.out + 1, states.lses, out_b, lse_b, merged.out, merged.lse),
          "out overlaps out_a");
  REFUSED(mh_merge_state(&merge, states.outs, merged.lse, out_b, merged.lse, merged.out, merged.lse),
          "lse overlaps lse_b");
  REFUSED(mh_merge_state(&merge, states.outs, states.lses, out_b, lse_b, merged.out, states.outs),
          "lse overlaps out_a");
  REFUSED(mh_merge_state(&merge, NULL, states.lses, out_b, lse_b, merged.out, merged.lse), "out_a is NULL");
  REFUSED(mh_merge_state(&merge, states.outs, states.lses, out_b, NULL, merged.out, merged.lse), "lse_b is NULL");
  REFUSED(mh_merge_state(NULL, states.outs, states.lses, out_b, lse_b, merged.out, merged.lse), "merge is NULL");
  merge.states = 3;
  REFUSED(mh_merge_state(&merge, states.outs, states.lses, out_b, lse_b, merged.out, merged.lse), "states is 3");
  merge.states = 2;
  set(merge.out_strides, MH * MM * MV, MM * MV, MV, 1);
  merge.outs_strides[1] = MH * MM * MV; /* other strides than those of out: not in place any more */
  merge.outs_strides[2] = MV;
  merge.outs_strides[3] = MH * MV;
  merge.outs_strides[4] = 1;
  REFUSED(mh_merge_state(&merge, merged.out, states.lses, out_b, lse_b, merged.out, merged.lse), "out overlaps out_a");
  CHECK(merged_untouched());
}

/* ---- The layer --------------------------------------------------------------------------------------------------- */

static void test_layer(void) {
  enum { E = 8, HEADS = 2, LEN = 5, BATCH = 2 };
  static float w[E * E], x[BATCH * LEN * E], out[BATCH * LEN * E], direct[BATCH * LEN * E];
  mh_mha_weights weights;
  mh_mha_call call;
  mh_mha* layer = NULL;
  mh_exec exec = default_exec();
  int i;
  for (i = 0; i < E; ++i) w[i * E + i] = 1;
  fill_random(x, BATCH * LEN * E);
  memset(&weights, 0, sizeof weights);
  weights.struct_size = sizeof weights;
  weights.embed_dim = E;
  weights.heads = HEADS;
  weights.w_q = weights.w_k = weights.w_v = weights.w_o = w;
  memset(&call, 0, sizeof call);
  call.struct_size = sizeof call;
  call.batch = BATCH;
  call.q_len = call.kv_len = LEN;
  call.x_q = x;
  call.out = out;

  REFUSED(mh_mha_create(&weights, NULL), "mha is NULL");
  layer = (mh_mha*)&weights;
  REFUSED(mh_mha_create(NULL, &layer), "weights is NULL");
  CHECK(layer == NULL);
#define BAD_WEIGHTS(change, word)                   \
  do {                                              \
    mh_mha_weights good = weights;                  \
    change;                                         \
    layer = (mh_mha*)&weights;                      \
    REFUSED(mh_mha_create(&weights, &layer), word); \
    CHECK(layer == NULL);                           \
    weights = good;                                 \
  } while (0)
  BAD_WEIGHTS(weights.struct_size = 0, "weights.struct_size is 0");
  BAD_WEIGHTS(weights.dtype = 7, "dtype");
  BAD_WEIGHTS(weights.layout = -1, "layout");
  BAD_WEIGHTS(weights.embed_dim = 0, "embed_dim");
  BAD_WEIGHTS(weights.heads = 3, "heads");
  BAD_WEIGHTS(weights.w_q = NULL, "w_q");
  BAD_WEIGHTS(weights.bias_k = x, "bias_v");

  /* With identity matrices the layer is attention over slices of x. */
  CHECK(mh_mha_create(&weights, &layer) == MH_OK);
  CHECK(mh_mha_run(layer, &call, NULL) == MH_OK);
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.batch = BATCH;
  p.heads = HEADS;
  p.q_len = p.kv_len = LEN;
  p.head_dim = E / HEADS;
  set(p.q_strides, LEN * E, E / HEADS, E, 1);
  memcpy(p.k_strides, p.q_strides, sizeof p.q_strides);
  memcpy(p.v_strides, p.q_strides, sizeof p.q_strides);
  memcpy(p.out_strides, p.q_strides, sizeof p.q_strides);
  memset(&t, 0, sizeof t);
  t.struct_size = sizeof t;
  t.q = t.k = t.v = x;
  t.out = direct;
  CHECK(mh_attention(&p, &t, NULL) == MH_OK);
  CHECK(all_near(out, direct, BATCH * LEN * E));

  memset(out, 0xa5, sizeof out);
  memcpy(direct, out, sizeof out);
  REFUSED(mh_mha_run(NULL, &call, NULL), "mha is NULL");
  REFUSED(mh_mha_run(layer, NULL, NULL), "call is NULL");
  exec.threads = -2;
  REFUSED(mh_mha_run(layer, &call, &exec), "threads is -2");
#define BAD_CALL(change, word)                     \
  do {                                             \
    mh_mha_call good = call;                       \
    change;                                        \
    REFUSED(mh_mha_run(layer, &call, NULL), word); \
    CHECK(memcmp(out, direct, sizeof out) == 0);   \
    call = good;                                   \
  } while (0)
  BAD_CALL(call.struct_size = 8, "call.struct_size is 8");
  BAD_CALL(call.batch = -1, "batch");
  BAD_CALL(call.q_len = -1, "q_len");
  BAD_CALL(call.x_q = NULL, "x_q");
  BAD_CALL(call.out = NULL, "out");
  BAD_CALL(call.causal = 5, "causal");
  BAD_CALL(call.flags = 64, "flags");
  BAD_CALL(call.softcap = -1, "softcap");
  BAD_CALL(call.out = x, "out");
  mh_mha_destroy(layer);
  mh_mha_destroy(NULL);
}

/* ---- A wrong environment ----------------------------------------------------------------------------------------- */

static int is_wrong_threads(const char* text) {
  char* end;
  if (text == NULL || *text == 0) return 0;
  return strtol(text, &end, 10) < 0 || *end != 0;
}

static int is_wrong_flag(const char* text) {
  return text != NULL && *text != 0 && strcmp(text, "0") != 0 && strcmp(text, "1") != 0;
}

static mh_status status_of_isa(const char* text) {
  int32_t i;
  if (text == NULL || *text == 0) return MH_OK;
  for (i = 0; i < mh_isa_count(); ++i) {
    if (strcmp(text, mh_isa_name(i)) == 0) return mh_isa_supported(i) ? MH_OK : MH_UNSUPPORTED;
  }
  return MH_INVALID_ARGUMENT;
}

/* ---- Measuring --------------------------------------------------------------------------------------------------- */

static void test_lines(void) {
  const char* line = "bf16 b2 h8/2 q3 kv40 d16 v24 causal align=br window=7,-1 lse2 bshd";
  size_t column = 99;
  mh_problem q;
  mh_plan* plan = NULL;
  char text[2048];
  memset(&q, 0x5a, sizeof q);
  q.struct_size = sizeof q;
  CHECK(mh_problem_parse(line, &q, &column) == MH_OK && column == 99);
  CHECK(q.struct_size == sizeof q && q.kv_heads == 2 && q.v_dim == 24 && q.outputs == MH_OUTPUT_LSE);
  CHECK(mh_plan_create(&q, &plan) == MH_OK);
  CHECK(mh_plan_describe(plan, MH_FORMAT_LINE, text, sizeof text, NULL) == MH_OK);
  CHECK(strncmp(text, line, strlen(line)) == 0);
  mh_plan_destroy(plan);
  REFUSED(mh_problem_parse("f32 b1 h1 q1 kv1 d1 casual", &q, &column), "casual");
  CHECK(column == 20);
  REFUSED(mh_problem_parse("f32 b1", &q, NULL), "h<number> is missing");
  REFUSED(mh_problem_parse(NULL, &q, NULL), "line is NULL");
  /* An older struct: nothing behind it is written. */
  memset(&q, 0x5a, sizeof q);
  q.struct_size = offsetof(mh_problem, causal);
  CHECK(mh_problem_parse("f32 b1 h1 q1 kv1 d1", &q, NULL) == MH_OK);
  CHECK(q.struct_size == offsetof(mh_problem, causal) && q.batch == 1 && q.causal == 0x5a5a5a5a);
  UNSUPPORTED(mh_problem_parse("f32 b1 h1 q1 kv1 d1 causal", &q, NULL), "struct_size");
  q.struct_size = 16;
  REFUSED(mh_problem_parse("f32 b1 h1 q1 kv1 d1", &q, NULL), "problem.struct_size is 16");
  q.struct_size = sizeof q;
  REFUSED(mh_problem_parse(line, NULL, NULL), "problem is NULL");
}

static void test_probes(void) {
  double rate = -1;
  CHECK(mh_probe_arithmetic(NULL, MH_DTYPE_F32, 1, 1e-4, &rate) == MH_OK && rate > 0);
  CHECK(mh_probe_arithmetic(mh_isa_current(), MH_DTYPE_F16, 2, 1e-4, &rate) == MH_OK && rate > 0);
  CHECK(mh_probe_read(NULL, 100000, 2, 1e-4, &rate) == MH_OK && rate > 0);
  CHECK(mh_probe_clock(1e-4, &rate) == MH_OK && rate > 0);
  REFUSED(mh_probe_arithmetic("mmx", MH_DTYPE_F32, 1, 1e-4, &rate), "mmx");
  REFUSED(mh_probe_arithmetic(NULL, 9, 1, 1e-4, &rate), "dtype is 9");
  REFUSED(mh_probe_arithmetic(NULL, MH_DTYPE_F32, 0, 1e-4, &rate), "threads is 0");
  REFUSED(mh_probe_arithmetic(NULL, MH_DTYPE_F32, 5000, 1e-4, &rate), "threads is 5000");
  REFUSED(mh_probe_arithmetic(NULL, MH_DTYPE_F32, 1, 0, &rate), "seconds is 0");
  REFUSED(mh_probe_arithmetic(NULL, MH_DTYPE_F32, 1, 1e-4, NULL), "flops is NULL");
  REFUSED(mh_probe_read(NULL, 0, 1, 1e-4, &rate), "bytes is 0");
  check_refused(__LINE__, mh_probe_read(NULL, (size_t)1 << 60, 2, 1e-4, &rate), MH_OUT_OF_MEMORY, "memory");
  REFUSED(mh_probe_read(NULL, 1, -1, 1e-4, &rate), "threads is -1");
  REFUSED(mh_probe_read(NULL, 1, 1, NAN, &rate), "seconds is nan");
  REFUSED(mh_probe_read(NULL, 1, 1, 1e-4, NULL), "bytes_per_second is NULL");
  REFUSED(mh_probe_clock(-1, &rate), "seconds is -1");
  REFUSED(mh_probe_clock(1e-4, NULL), "hertz is NULL");
}

static void test_measure(void) {
  mh_plan* plan = NULL;
  double times[5] = {-1, -1, -1, -1, -1};
  int64_t runs = 0;
  int i;
  set_up();
  CHECK(mh_plan_create(&p, &plan) == MH_OK);
  CHECK(mh_plan_measure(plan, &t, NULL, 60, 3, times, &runs) == MH_OK && runs == 3);
  for (i = 0; i < 5; ++i) CHECK((times[i] >= 0) == (i < 3));
  CHECK(!untouched());
  CHECK(mh_plan_measure(plan, &t, NULL, 0, 5, times, &runs) == MH_OK && runs == 1);
  REFUSED(mh_plan_measure(plan, &t, NULL, 1, 0, times, &runs), "most is 0");
  REFUSED(mh_plan_measure(plan, &t, NULL, -1, 1, times, &runs), "seconds is -1");
  runs = 77;
  REFUSED(mh_plan_measure(plan, NULL, NULL, 1, 1, times, &runs), "tensors is NULL");
  CHECK(runs == 77);
  REFUSED(mh_plan_measure(NULL, &t, NULL, 1, 1, times, &runs), "plan is NULL");
  REFUSED(mh_plan_measure(plan, &t, NULL, 1, 1, NULL, &runs), "times is NULL");
  REFUSED(mh_plan_measure(plan, &t, NULL, 1, 1, times, NULL), "runs is NULL");
  mh_plan_destroy(plan);
}

/* Nothing of the caller's floating-point state changes, flags included, and so no trap that it has set is sprung. */
static void test_float_state(void) {
  enum { DIM = 8 };
  static const double nan_here = NAN;
  static float w[DIM * DIM], x[3 * DIM], y[3 * DIM], lses[3];
  mh_mha_weights weights;
  mh_mha_call call;
  mh_mha* mha = NULL;
  mh_plan* plan = NULL;
  double hertz = 0, times[1];
  int64_t runs = 0;
  int i;
  for (i = 0; i < DIM * DIM; ++i) w[i] = 1.0f / (float)(i + 3);
  for (i = 0; i < 3 * DIM; ++i) x[i] = 1.0f / (float)(i + 7);
  memset(&weights, 0, sizeof weights);
  weights.struct_size = sizeof weights;
  weights.embed_dim = DIM;
  weights.heads = 2;
  weights.w_q = weights.w_k = weights.w_v = weights.w_o = w;
  memset(&call, 0, sizeof call);
  call.struct_size = sizeof call;
  call.batch = 1;
  call.q_len = call.kv_len = 3;
  call.x_q = x;
  call.out = y;
  memset(&merge, 0, sizeof merge);
  merge.struct_size = sizeof merge;
  merge.states = 3;
  merge.batch = merge.heads = merge.q_len = 1;
  merge.v_dim = DIM;
  set_up_plain();
  CHECK(mh_plan_create(&p, &plan) == MH_OK);

  feclearexcept(FE_ALL_EXCEPT);
  CHECK(mh_attention(&p, &t, NULL) == MH_OK);
  CHECK(mh_mha_create(&weights, &mha) == MH_OK);
  CHECK(mh_mha_run(mha, &call, NULL) == MH_OK);
  CHECK(mh_merge_states(&merge, x, lses, y, NULL) == MH_OK);
  call.softcap = nan_here;
  REFUSED(mh_mha_run(mha, &call, NULL), "softcap is nan");
  mh_mha_destroy(mha);
  weights.scale = nan_here;
  REFUSED(mh_mha_create(&weights, &mha), "scale is nan");
  REFUSED(mh_probe_clock(nan_here, &hertz), "seconds is nan");
  REFUSED(mh_plan_measure(plan, &t, NULL, nan_here, 1, times, &runs), "seconds is nan");
  mh_plan_destroy(plan);
  p.scale = nan_here;
  REFUSED(mh_plan_create(&p, &plan), "scale is nan");
  CHECK(fetestexcept(FE_ALL_EXCEPT) == 0);
}

static void test_profile(void) {
  mh_profile_options options;
  size_t needed = 0;
  char* text;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.calls = -1;
  REFUSED(mh_profile_begin(&options), "options.calls is -1");
  options.calls = 2;
  options.flags = 8;
  REFUSED(mh_profile_begin(&options), "options.flags");
  options.flags = MH_PROFILE_COUNTERS;
  options.struct_size = 4;
  REFUSED(mh_profile_begin(&options), "options.struct_size is 4");
  options.struct_size = sizeof options;
  REFUSED(mh_profile_end(), "no profile is running");
  CHECK(mh_profile_begin(&options) == MH_OK);
  REFUSED(mh_profile_begin(NULL), "a profile is running");
  REFUSED(mh_profile_describe(MH_PROFILE_SUMMARY, NULL, 0, &needed), "a profile is running");
  set_up();
  CHECK(mh_attention(&p, &t, NULL) == MH_OK);
  CHECK(mh_profile_end() == MH_OK);
  REFUSED(mh_profile_describe(2, NULL, 0, &needed), "format is 2");
  CHECK(mh_profile_describe(MH_PROFILE_TRACE, NULL, 0, &needed) == MH_OK && needed > 100);
  text = malloc(needed);
  CHECK(text != NULL && mh_profile_describe(MH_PROFILE_TRACE, text, needed, NULL) == MH_OK);
  CHECK(strlen(text) == needed - 1 && strstr(text, "\"traceEvents\"") != NULL && strstr(text, "\"phases\"") != NULL);
  free(text);
  CHECK(mh_profile_begin(NULL) == MH_OK);
  CHECK(mh_profile_end() == MH_OK);
}

static void test_wrong_environment(mh_status status, const char* name, const char* value) {
  mh_mha_weights weights;
  mh_mha* layer = NULL;
  static float w[4];
  set_up();
  check_problem(__LINE__, status, name);
  check_problem(__LINE__, status, value);
  memset(&weights, 0, sizeof weights);
  weights.struct_size = sizeof weights;
  weights.embed_dim = 2;
  weights.heads = 1;
  weights.w_q = weights.w_k = weights.w_v = w;
  check_refused(__LINE__, mh_mha_create(&weights, &layer), status, name);
  CHECK(layer == NULL);
  if (strcmp(name, "MH_ISA") == 0) CHECK(mh_isa_current() == NULL);
}

int main(void) {
  const char* isa = getenv("MH_ISA");
  const char* threads = getenv("MH_THREADS");
  const char* f32_unit = getenv("MH_F32_UNIT");
  const char* openmp = getenv("MH_OPENMP");
  openmp_is_off = openmp != NULL && strcmp(openmp, "0") == 0;
  CHECK(mh_last_error() != NULL && mh_last_error()[0] == 0);
  if (is_wrong_threads(threads)) {
    test_wrong_environment(MH_INVALID_ARGUMENT, "MH_THREADS", threads);
  } else if (is_wrong_flag(f32_unit)) {
    test_wrong_environment(MH_INVALID_ARGUMENT, "MH_F32_UNIT", f32_unit);
  } else if (is_wrong_flag(openmp)) {
    test_wrong_environment(MH_INVALID_ARGUMENT, "MH_OPENMP", openmp);
  } else if (status_of_isa(isa) != MH_OK) {
    test_wrong_environment(status_of_isa(isa), "MH_ISA", isa);
  } else {
    test_names();
    test_isa_and_threads();
    test_problem_numbers();
    test_problem_positions();
    test_problem_strides();
    test_struct_size();
    test_tensors();
    test_overlaps();
    test_results();
    test_empty();
    test_too_large();
    test_exec();
    test_callers();
    test_describe();
    test_merge();
    test_merge_exec();
    test_layer();
    test_lines();
    test_probes();
    test_measure();
    test_float_state();
    test_profile();
  }
  printf("%ld checks, %ld failures\n", checks, failures);
  return failures != 0;
}
