// The decision how to compute a problem: a pure function of (problem, ISA table, cache sizes, kind of core). Printable, and
// testable without running. Nothing in it that a bit of a result depends on depends on the number of threads or on neighbours in the
// batch.
#pragma once

#include <string>

#include "kernels/kernel_api.hpp"
#include "problem.hpp"

namespace manyhead {

enum class cpu_core : int32_t;
struct machine;

// How the first pass of a plan is cut into tasks for a number of workers (schedule.hpp).
struct task_cut {
  int64_t together;         // kv heads of a task, but for the last of a batch entry
  int64_t entry_parts;      // of a batch entry: its kv heads, so many together counting as one
  int64_t heads;            // of all batch entries
  int64_t piece_rows;       // rows of a task, but for the last of a block
  int64_t block_pieces;     // tasks of a whole row block and chunk
  int64_t last_pieces;      // of the last row block and chunk
  int64_t head_pieces;      // into how many pieces its rows are cut
  int64_t head_tasks;       // tasks of a batch entry and kv head: pieces times chunks
  int64_t interleaved = 1;  // the last so many heads are taken together, longest tasks of all of them first
  bool in_shares;
  bool last_longest;  // the last rows attend most keys
};

enum class keeping { nothing, of_all, of_task };

struct plan : reading {
  problem p;
  const kernel_table* table;
  route kernel;
  int64_t block_q;               // rows of a task (see kernel_api.hpp), but for last_rows
  int64_t row_blocks;            // tasks along the rows
  int64_t last_rows;             // of a head: those of its last task that take the decode route
  int64_t panel_rows;            // rows that a kernel works on together, the grain of tasks
  int64_t block_kv;              // keys of a tile
  int64_t entries, entry_heads;  // batch entries and kv heads of each, as tasks have them (layout.hpp: joined)
  int64_t heads_at_once;         // most kv heads of a task
  int64_t chunk_keys;            // keys of a split
  int64_t chunks;                // splits; 1 = none
  // For weights, their means and column sums the first pass keeps its scores: of all rows, of which tasks of a second one then
  // make them; or of a task's rows, kept_rows of a head at a time, of which the task itself does, against all keys. Either kind of
  // task takes weighed_rows of one kv head; of means whole queries and all heads of them.
  keeping keeps;
  int64_t kept_rows;
  int64_t weighed_rows, weighed_blocks;  // weighed_blocks: how many blocks of them a head has
  int64_t tasks;                         // of the first pass, of a row block, kv head and chunk each (schedule.hpp)
  double flops;  // of the attended pairs, 2 (head_dim + v_dim) each; lengths in memory are not known yet: as if full
  double bytes;  // of q, k, v, out, each read or written once
  int64_t share_threads;  // with so many threads and more, each may have a share of the tasks of its own (deal.hpp)
  double tiles_skipped;   // share of (panel of rows, key tile) pairs that positions rule out
  int64_t scratch_bytes;  // of one thread, where it keeps scores kept_at bytes on
  int64_t kept_at;
  int64_t shared_bytes;                            // of all threads together, the sum of:
  int64_t partial_out_bytes, partial_state_bytes;  // split-KV
  int64_t kept_bytes;                              // scores of all rows
  int64_t column_bytes;                            // column sums of each row block
  int64_t openings_bytes;                          // what masks leave open (openings.hpp)

  double expected_us;  // how long one thread takes at most
  kernel_call call;    // what kernels are told of it; pointers are NULL
  task_cut alone;      // for one worker

  int64_t lanes() const { return table->lanes / (p.is_f64() ? 2 : 1); }  // of a vector, in the arithmetic type
  // Sooner done by one thread than a second one is awake, which costs 3 to 100 microseconds.
  bool is_short() const { return expected_us < 30; }
};

// How long one thread takes, at rates that any core of the last ten years reaches: 40 GFLOP/s, 10 GB/s.
double expected_us(double flops, double bytes);
inline bool has_second_pass(const problem& p) { return (p.outputs & ~uint32_t{MH_OUTPUT_LSE}) != 0; }
inline bool takes_turns(const plan& p) { return p.k_turn > 0; }
inline bool means(const problem& p) { return p.has_output(MH_OUTPUT_MEAN_WEIGHTS); }

extern const char* const route_names[route_count];

// core: machine.hpp, 0 = any. l3_bytes: 0 = unknown.
plan make_plan(const problem& p, const kernel_table& table, int64_t l2_bytes, cpu_core core = cpu_core{},
               int64_t l3_bytes = 0);
plan make_plan(const problem& p, const kernel_table& table, const machine& m);

// The same with fewer chunks, for a run whose keys all lie in the first ones. What it needs of memory stays.
plan with_chunks(const plan& whole, int64_t chunks);

// "f32 b1 h8 q128 kv128 d64: attention/f32/tile@avx512 (avx512, f32), block_q 144, ..." or as JSON; with the balance of its first pass on
// so many threads (schedule.hpp). In describe.cpp.
std::string describe(const plan& plan, bool json, int64_t threads = 1);

}  // namespace manyhead
