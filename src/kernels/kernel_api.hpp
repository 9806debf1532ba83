// The seam between the portable core and the ISA code: plain data and function pointers, nothing else. It is compiled
// into objects with different instruction sets, so it must hold no functions, no std types, no inline code.
#pragma once

#include "manyhead/manyhead.h"

namespace manyhead {

// Rows: the `group` query heads that share a kv head, times q_len, are one list of rows: row r is query i = r / group
// of head kv_head * group + r % group. So a panel of neighbouring rows has neighbouring positions, and reads K and V
// once for the whole group.

struct kernel_call;
struct kernel_task;
using task_fn = void (*)(const kernel_call*, const kernel_task*);

// How K, V, Q and out are read and written: what the plan settles and the kernels do.
struct reading {
  bool prefetch;       // ask for rows of K, V, Q and out ahead of need
  bool asks_own;       // a decode step asks for rows of K with K and of V with V; else for each with the other
  bool asks_l1;        // a decode step asks for rows in 16 bits into L1, else into L2
  bool asks_in_order;  // and line after line, for rows without gaps between them (decode.hpp: in_order)
  bool whole_v_rows;   // four of its rows, where two can, take whole rows of V in twos
  bool adds_rows;      // a decode step of 3 rows more than whole fours has one of zeros more
  bool unit_steps;  // a decode step multiplies on the matrix unit (how_unit_steps), up to kernel_call::unit_keys keys
  bool copy_kv;     // copy each K and V tile to scratch first, converted or made contiguous (route.cpp: needs_copy)
  int64_t k_turn, v_turn;  // keys of K and of V in a turn of a decode step's task of several kv heads; 0: whole tiles
};

// What some queries may attend as far as a mask or bias goes: keys from the first that is open to any of them to behind the last;
// those that are open to all.
struct opening {
  int64_t any_begin, any_end, all_begin, all_end;  // begin >= end: none
  bool closes;  // it is a bias that hides whole words of keys from some query, or does nothing else than to hide some
  bool adds;    // it is a bias that does something else
};
inline constexpr int64_t word_keys = 32;  // keys of a word of bits
// A mask that heads share, or a bias that is one, looked at once for all of them before the tasks (openings.hpp). Of each batch
// entry and query a row of words: a bit for each key, and one word more, as tiles begin anywhere. And what so many queries share.
// Of masks that queries share, too, one row and one block for all of them.
inline constexpr int64_t opening_queries = 8;
struct openings {
  uint32_t* words;  // NULL: each task looks for itself
  opening* blocks;
  int64_t row_words;                               // of a row; 0: there are none
  int64_t batch_words, query_words, batch_blocks;  // strides, 0 where entries or queries share
};

// What all tasks of one call share. Strides in elements; dimension order as in manyhead.h. Heads of several batch entries
// may be told as those of one (plan.hpp: entries), here and in kernel_task.
struct alignas(64) kernel_call : reading {  // copied for each call, by whole lines
  int64_t heads, kv_heads, group, q_len, kv_len, head_dim, v_dim;
  int64_t rows;        // group * q_len
  int64_t extra_keys;  // the last keys, attended whatever the masks say

  const void* q;
  const void* k;
  const void* v;
  void* out;
  int64_t q_strides[4], k_strides[4], v_strides[4], out_strides[4];

  // Scores are computed in units in which the softmax is exp2((s - max) * exp_scale): q_scale = scale * log2(e) and
  // exp_scale = 1; where it costs less to multiply in the exponent, q_scale = 1 and exp_scale = scale * log2(e); where
  // something is added to or done with the natural scores, q_scale = scale and exp_scale = log2(e).
  double q_scale;
  double exp_scale;

  double softcap;    // 0 = off
  int32_t fast_exp;  // 1: exponentials of 13 bits, and weights of fewer parts on a matrix unit
  int32_t causal;
  int32_t align;  // mh_align, never unset
  int64_t q_offset;
  int64_t window_left, window_right;  // -1 = none
  int32_t index_type;
  int32_t bias_dtype;
  int32_t alibi_mode;
  bool may_lie_far;  // a bias or ALiBi, and no sinks: all scores of a row may be far from 0 (far.hpp)
  int32_t lse_base;

  const uint8_t* mask;
  const void* bias;
  const uint8_t* key_mask;
  const void* seqused_k;
  const void* q_offsets;
  const void* alibi_slopes;  // real
  const void* sinks;         // real
  int64_t mask_strides[4], bias_strides[4], key_mask_strides[2], alibi_batch_stride;
  openings mask_open, bias_open, key_mask_open;

  void* lse;  // real or NULL, in lse_base
  int64_t lse_strides[3];

  // Partial results of split-KV: real [chunks][batch][heads][q_len][v_dim]; and what is left of rows' softmax, as {top, total}:
  // total = sum of exp2((s - top) * exp_scale) over a row's keys and its sink, 0 for none. Not their logarithm: where scores are
  // large its few bits after the point would be lost. [chunks][batch][heads][q_len][2].
  void* partial_out;
  double* partial_states;
  int64_t batch;
  int64_t chunks;      // 1 = not split: tasks write out and lse themselves
  int64_t chunk_keys;  // keys of a chunk, a multiple of the panels' block_kv; where they begin: positions.hpp

  int64_t block_kv;   // keys of a tile; borders lie at its multiples
  int64_t unit_keys;  // of a batch entry, at most, for a decode step to multiply on the matrix unit

  // Of a row of kept scores, in elements (kept.hpp); 0 = none are kept. Not a multiple of a page's quarters: rows would crowd
  // few sets of L1.
  int64_t kept_pitch;

  // Outputs of the second pass: weights.hpp, from kept scores, and scores_output.hpp.
  void* weights;       // real or NULL
  void* mean_weights;  // real or NULL
  void* scores;        // real or NULL
  int32_t scores_stage;
  int64_t weights_strides[4], mean_weights_strides[3], scores_strides[4];
  void* column_partials;  // real [batch][heads][row_blocks][kv_len] or NULL
  int64_t row_blocks;

  task_fn tile;  // the tile route, to which the matrix route leaves what its unit cannot do
};

// What a task's time goes into.
enum phase : int32_t {
  phase_pack,     // Q packed; K and V copied, converted or brought into the matrix unit's order
  phase_scores,   // Q K^T
  phase_mask,     // what masks, softcap, ALiBi and bias do to scores
  phase_softmax,  // maxima, exponentials, sums
  phase_values,   // P V
  phase_store,    // divided, transposed, written to out
  phase_merge,    // partial results joined
  phase_weights,  // what comes after: weights, scores, column sums
  phase_project,  // the layer's projections
  phase_count
};

// A profile's view of a running task, in ticks (ticks.hpp).
struct phase_clock {
  uint64_t last;    // the end of the last phase
  uint64_t weight;  // how often what follows counts
  uint64_t ticks[phase_count];
};

// One unit of work; tasks of one call write disjoint memory.
struct kernel_task {
  int64_t batch;
  // One kv head; of the decode route several, and all of them where heads are averaged.
  int64_t kv_head_begin, kv_head_end;
  int64_t row_begin, row_end;
  int64_t chunk;                  // index of the KV chunk
  int64_t row_block;              // index of [row_begin, row_end) among the blocks
  void* scratch;                  // scratch_bytes(call), 64-byte aligned
  void* kept;                     // scores of row kept_first of the first kv head, where they are kept
  int64_t kept_first, kept_head;  // kept_head: elements from a kv head's to the next one's
  // NULL, or what this thread does next: its first rows may be asked for. Of it only batch, kv heads, rows and chunk are
  // set.
  const kernel_task* next;
  phase_clock* clock;  // NULL: not profiled
};

// Merging `states` partial results, one row after another: of mh_merge_states, by their lse, or of split-KV, by
// {top, total}.
struct merge_args {
  int64_t states, heads, q_len, v_dim;
  const void* outs;
  const void* lses;              // real; NULL where row states are given
  const double* partial_states;  // [states][rows][2] or NULL
  int64_t rows;                  // of partial_states
  double exp_scale;              // of partial_states
  void* out;
  void* lse;  // may be NULL
  int64_t outs_strides[5], lses_strides[4], out_strides[4], lse_strides[3];
  int32_t lses_base;  // mh_lse_base
  int32_t lse_base;
};
// Rows [begin, end) of the flattened [batch, heads, q_len].
using merge_fn = void (*)(const merge_args*, int64_t begin, int64_t end);

// y[rows][columns] = x W^T + b for one panel of packed weights, of the layer's projections, all of one dtype but x. Strides in
// elements; the elements of a row lie next to each other. y overlaps nothing.
struct linear_args {
  const void* x;  // in the arithmetic type: f32, or f64
  int64_t x_stride;
  int64_t rows, in;
  const void* weights;  // [in][columns rounded up to whole vectors], on a vector's boundary; what pads is finite
  const void* bias;     // [columns rounded up]
  void* y;
  int64_t y_stride;
  int64_t columns;  // 1 .. the table's linear_width
};
using linear_fn = void (*)(const linear_args*);
// Such rows of x from those in the dtype.
using widen_fn = void (*)(const void* x, int64_t x_stride, int64_t rows, int64_t in, void* to, int64_t to_stride);

// The same for outputs of several panels on a matrix unit, which multiplies numbers of its own.
inline constexpr int64_t most_unit_rows = 128;
struct linear_unit_args {
  const void* x;
  int64_t x_stride;
  int64_t rows, in;     // rows: up to most_unit_rows
  const void* weights;  // as pack_weights leaves them, from a multiple of 32 outputs on
  const void* bias;     // [columns]
  void* y;
  int64_t y_stride;
  int64_t columns;
  void* scratch;  // row_bytes(rows, in), 64-byte aligned
  uint8_t* left;  // [rows]: 1 = of numbers that are not for the unit; its y holds anything
};
struct linear_unit_kernels {
  void (*run)(const linear_unit_args*);  // NULL: there is no unit
  int64_t (*row_bytes)(int64_t rows, int64_t in);
  int64_t (*weight_words)(int64_t out, int64_t in);
  // From the panels of linear_fn. False: of numbers that are not for the unit.
  bool (*pack_weights)(const void* panels, int64_t out, int64_t in, uint32_t* to);
  int64_t least_rows, least_size;  // of an entry, of inputs and outputs: below, one entry is as fast with linear_fn
  int32_t speed;                   // about how many times as fast as linear_fn
  bool alone;                      // any number of rows is for the unit, none is left: linear_fn is for W that is not
};

// What a core can do at most, for profiles: `turns` turns of a loop of independent multiply-adds on the unit that the
// kernels of a dtype use, and reading memory, a multiple of 512 bytes, with whole vectors. Both return something that
// depends on all of it.
using arithmetic_fn = double (*)(int64_t turns);
using read_fn = uint64_t (*)(const void*, int64_t bytes);

// Scores in natural units are multiplied with it, as exponentials are powers of two; logarithms back with the other.
inline constexpr double log2e = 1.4426950408889634074, ln2 = 0.69314718055994530942;

enum route : int32_t { route_tile, route_decode, route_matrix, route_count };

// A kv head of so many rows may take the decode route, and a task of it has room for so many rows of all its kv heads.
inline constexpr int64_t most_decode_rows = 32, most_rows_at_once = 128;
// Keys of K and of V in a turn of its kv heads. A plan may have others (k_turn, v_turn) for tasks that ask for lines in order.
inline constexpr int64_t usual_k_turn = 16, usual_v_turn = 32;
// A task of the tile route, and of the matrix route, has room for so many panels of rows.
inline constexpr int64_t most_tile_panels = 16, most_matrix_panels = 32;
// What a matrix unit multiplies at a time: rows of A, and columns of B.
inline constexpr int64_t unit_rows = 32;
// And all routes have room for a tile of so many keys.
inline constexpr int64_t most_tile_keys = 256;

// How the decode route multiplies on the unit, where the plan says so: 32 keys at a time with tiles (decode_unit.hpp), for heads of
// multiples of 32, or by pairs in the place of multiply-adds (decode_pairs.hpp), for heads of 32 and more.
enum how_unit_steps : int32_t { no_unit_steps, steps_of_tiles, steps_of_pairs };

inline constexpr int32_t dtype_count = MH_DTYPE_F16 + 1;  // of mh_dtype, whose last one it is

struct dtype_kernels {
  task_fn attention[route_count];               // route_matrix: NULL where there is no matrix unit for the type
  task_fn weights;                              // second pass: weights, their means and column sums from kept scores
  task_fn scores;                               // of one kv head, with scratch of the tile route
  task_fn open_mask, open_bias, open_key_mask;  // fill queries [row_begin, row_end) of kernel_call::mask_open and so on
  merge_fn merge;                               // states and result of this dtype
  merge_fn merge_real;                          // states in real, result of this dtype: joins split-KV partials
  int64_t (*scratch_bytes[route_count])(const kernel_call&, int64_t block_q);  // of a route's tasks
  arithmetic_fn arithmetic;
  int64_t flops_of_turn;  // of `arithmetic`
  // With fewer rows (group * q_len) or keys the matrix route, where it exists, is slower; of f32 see route.cpp too.
  int32_t matrix_rows, matrix_keys;
  int32_t unit_steps;  // how_unit_steps
  linear_fn linear;
  widen_fn widen;  // NULL: the dtype is the arithmetic type
  linear_unit_kernels linear_unit;
};

struct kernel_table {
  const char* isa;
  int32_t lanes;                     // floats in a vector
  int32_t panel_rows[2];             // rows of the widest panel: [0] for float arithmetic, [1] for double
  dtype_kernels dtype[dtype_count];  // by mh_dtype
  int32_t linear_width[2];           // outputs of a whole panel of packed weights: [0] float arithmetic, [1] double
  read_fn read;
};

}  // namespace manyhead
