// See scheduler.hpp. A phase (first pass, merge, second pass, scores, column sums) is a list of items that write disjoint
// memory. It is given to `threads` workers, each with a scratch slot of its own, which take items (deal.hpp) until none
// is left. What an item computes does not depend on who runs it, so neither do the bits.
#include "scheduler.hpp"

#include <algorithm>
#include <atomic>

#include "blocks.hpp"
#include "check.hpp"
#include "deal.hpp"
#include "fp_state.hpp"
#include "kernels/positions.hpp"
#include "openings.hpp"
#include "pool.hpp"
#include "profile.hpp"
#include "route.hpp"
#include "schedule.hpp"
#include "thread_memory.hpp"

namespace manyhead {
namespace {

// The memory of one run: the caller's, or this thread's.
class workspace {
 public:
  workspace(int64_t bytes, const mh_exec& exec) : memory_(kept(), exec.workspace == nullptr ? bytes : 0) {
    if (exec.workspace != nullptr) {
      if (exec.workspace_size < static_cast<size_t>(bytes)) {
        invalid("exec.workspace_size is ", exec.workspace_size, ", must be at least ", bytes);
      }
      base_ = static_cast<char*>(exec.workspace);
      return;
    }
    base_ = memory_.get();
  }
  workspace(const workspace&) = delete;
  workspace& operator=(const workspace&) = delete;

  char* take(int64_t bytes) noexcept {
    char* at = base_ + used_;
    used_ += round_up(bytes, 64);
    return at;
  }

 private:
  // Out of line, as each mention of what is a thread's own is a call.
  __attribute__((noinline)) static thread_memory& kept() { return thread_memory::of<workspace>(); }

  char* base_ = nullptr;
  borrowed_memory memory_;
  int64_t used_ = 0;
};

// What a worker of for_each is told of an item.
struct turn {
  int64_t worker;
  int64_t index;
  int64_t next;  // the index that this worker does next, -1 where it does not know
  watched_worker* watched;
};

// What the workers of for_each share.
template <class Item>
struct shared_items {
  const Item* item;
  const watched_stage& watched;
  const mh_exec& exec;
  const int64_t workers;
  std::atomic<int64_t> gate;
  deal items;  // lines of its own
};

template <class Item>
void do_range(const Item& item, int64_t begin, int64_t end, int64_t worker, watched_worker& watched) {
  for (int64_t i = begin; i < end; ++i) {
    watched.begin_task();
    item(turn{worker, i, i + 1 < end ? i + 1 : -1, &watched});
    watched.end_task();
  }
}

template <class Item>
void do_items(shared_items<Item>& s, int64_t worker) {
  watched_worker watched(s.watched, worker);
  const int64_t own = s.items.in_shares() ? thread_number(worker, s.workers, s.exec) : 0;
  for (deal::run now{}; s.items.take(own, now);) do_range(*s.item, now.begin, now.end, worker, watched);
}

// item(turn) for each index of 0..items-1 on at most `threads` workers, all of them `what` to a profile.
template <class Item>
void for_each(int64_t items, int64_t threads, const mh_exec& exec, const watched_call& watched, phase what,
              const Item& item, dealing how = {}) {
  if (items <= 0) return;
  using shared = shared_items<Item>;
  const int64_t workers = std::min(items, threads);
  const watched_stage stage(watched, what, items, workers);
  if (workers == 1) {  // nothing is shared
    watched_worker alone(stage, 0);
    return do_range(item, 0, items, 0, alone);
  }
  shared state{&item, stage, exec, workers, {}, deal(items, workers, how)};
  // What the gate orders: everything before this store happens before every item, every item before the load at the
  // end. The pool orders both as well, but neither every host's nor, to ThreadSanitizer, oneTBB's can be seen to.
  state.gate.store(0, std::memory_order_release);
  spread(
      workers, exec,
      [](void* arg, int64_t worker) {
        const default_fp_state fp;
        auto* s = static_cast<shared*>(arg);
        (void)s->gate.load(std::memory_order_acquire);  // before anything else of the state is looked at
        do_items(*s, worker);
        s->gate.fetch_add(1);  // a write, which the load at the end sees: finding nothing left was only a read
      },
      &state);
  if (state.gate.load(std::memory_order_acquire) == 0) {  // one that is called leaves nothing to do
    fail(MH_INTERNAL_ERROR, "exec.parallel_for called none of ", workers, " tasks, must call each of them once");
  }
}

// How many tasks a worker takes at a time: about so many microseconds of work, and at most a sixteenth of its share. One by
// one, neighbouring arrays go to different cores: 256 tasks of 1 us took 219 us on two threads, 8 at a time take 179.
constexpr double taken_us = 20;
int64_t step_of(const plan& plan, int64_t tasks, int64_t threads) {
  if (threads == 1) return 1;
  const double most = taken_us * static_cast<double>(tasks) / std::max(plan.expected_us, 1.0);
  return std::clamp<int64_t>(tasks / (16 * threads), 1,
                             std::max<int64_t>(1, static_cast<int64_t>(std::min(most, 1e6))));
}

// Tasks of a pass after the first: `blocks` of the rows of a kv head, or of all kv heads of a batch entry.
int64_t row_tasks(const plan& plan, int64_t blocks, bool all_heads) {
  return plan.p.batch * blocks * (all_heads ? 1 : plan.p.kv_heads);
}
int64_t weights_tasks(const plan& plan) {
  return plan.keeps == keeping::of_all ? row_tasks(plan, plan.weighed_blocks, means(plan.p)) : 0;
}
row_blocks scores_blocks(const plan& plan) {
  const int64_t all = plan.p.rows(), rows = scores_block_q(plan);
  return {blocks(all, rows), rows, all};
}
int64_t scores_tasks(const plan& plan) {
  return plan.p.has_output(MH_OUTPUT_SCORES) ? row_tasks(plan, scores_blocks(plan).count, false) : 0;
}

void set_tensors(kernel_call& c, const mh_tensors& t) {
  c.q = t.q;
  c.k = t.k;
  c.v = t.v;
  c.out = t.out;
  c.mask = t.mask;
  c.bias = t.bias;
  c.key_mask = t.key_mask;
  c.seqused_k = t.seqused_k;
  c.q_offsets = t.q_offset;
  c.alibi_slopes = t.alibi_slopes;
  c.sinks = t.sinks;
  c.lse = t.lse;
  c.weights = t.weights;
  c.mean_weights = t.mean_weights;
  c.scores = t.scores;
}

void merge_chunks(const plan& plan, const kernel_call& c, int64_t threads, const mh_exec& exec,
                  const watched_call& watched) {
  const int64_t rows = c.batch * c.heads * c.q_len;
  merge_args m{};
  m.states = c.chunks;
  m.heads = c.heads;
  m.q_len = c.q_len;
  m.v_dim = c.v_dim;
  m.outs = c.partial_out;
  m.partial_states = c.partial_states;
  m.rows = rows;
  m.exp_scale = c.exp_scale;
  m.out = c.out;
  m.lse = c.lse;
  const int64_t outs_strides[5] = {rows * c.v_dim, c.heads * c.q_len * c.v_dim, c.q_len * c.v_dim, c.v_dim, 1};
  std::copy_n(outs_strides, 5, m.outs_strides);
  std::copy_n(c.out_strides, 4, m.out_strides);
  std::copy_n(c.lse_strides, 3, m.lse_strides);
  m.lse_base = c.lse_base;
  // About 16 KB of partial results an item: enough to be worth handing out, and few rows of many chunks still make many.
  const int64_t rows_at_once = std::clamp<int64_t>(4096 / (c.chunks * c.v_dim), 1, 32);
  for_each(blocks(rows, rows_at_once), threads, exec, watched, phase_merge, [&](const turn& t) {
    plan.table->dtype[plan.p.dtype].merge_real(&m, t.index * rows_at_once,
                                               std::min(rows, (t.index + 1) * rows_at_once));
  });
}

// Column sums of a block of rows of a query head, counted through the batch.
template <class Real>
Real* columns_of(const kernel_call& c, int64_t head_index, int64_t block) {
  return static_cast<Real*>(c.column_partials) + (head_index * c.row_blocks + block) * c.kv_len;
}

template <class Real>
void add_columns(const kernel_call& c, const problem& p, Real* sums, int64_t head_index) {
  const Real* from = columns_of<Real>(c, head_index, 0);
  Real* to = sums + head_index / c.heads * p.column_sums_strides[0] + head_index % c.heads * p.column_sums_strides[1];
  for (int64_t k = 0; k < c.kv_len; ++k) {
    Real sum = 0;
    for (int64_t b = 0; b < c.row_blocks; ++b) sum += from[b * c.kv_len + k];
    to[k * p.column_sums_strides[2]] = sum;
  }
}

// What the tasks of a run share.
struct job {
  const manyhead::plan& plan;
  const dtype_kernels& kernels;
  char* kept;   // scores of all rows
  char* slots;  // scratch, of each worker slot_bytes
  int64_t slot_bytes;
  kernel_call c;
  const kernel_call* last;  // what the plan's last_rows are told

  void* slot(int64_t worker) const { return slots + worker * slot_bytes; }

  void attend(const kernel_task& t) const {
    if (plan.last_rows > 0 && t.row_end == c.rows) return attend_with_last(t);
    kernels.attention[plan.kernel](&c, &t);
  }

  // Out of line what few runs need: the others' code stays short, a task of theirs may take 50 ns.
  __attribute__((noinline)) void attend_with_last(kernel_task t) const {
    t.row_end -= plan.last_rows;
    kernels.attention[plan.kernel](&c, &t);
    t.row_begin = t.row_end;
    t.row_end = c.rows;
    t.next = nullptr;
    kernels.attention[route_decode](last, &t);
  }

  // Where scores of a task's heads are, of those kept of all rows.
  void keep_of_all(kernel_task& t) const {
    t.kept_head = c.rows * c.kept_pitch;
    const int64_t from = (t.batch * c.kv_heads + t.kv_head_begin) * t.kept_head;
    t.kept = kept + from * real_size(plan.p.dtype);
  }

  // Task `now` of row_tasks.
  kernel_task rows_at(const turn& now, const row_blocks& of, bool all_heads) const {
    kernel_task t{};
    t.scratch = slot(now.worker);
    const int64_t i = now.index / of.count;
    of.put(now.index % of.count, t);
    t.kv_head_begin = all_heads ? 0 : i % plan.p.kv_heads;
    t.kv_head_end = all_heads ? plan.p.kv_heads : t.kv_head_begin + 1;
    t.batch = all_heads ? i : i / plan.p.kv_heads;
    return t;
  }

  // Those of a block of rows begin at 0.
  void clear_columns(const kernel_task& t) const {
    if (plan.column_bytes == 0) return;
    for (int64_t head = t.kv_head_begin * c.group; head < t.kv_head_end * c.group; ++head) {
      const int64_t index = t.batch * c.heads + head;
      if (plan.p.is_f64()) {
        std::fill_n(columns_of<double>(c, index, t.row_block), c.kv_len, 0.0);
      } else {
        std::fill_n(columns_of<float>(c, index, t.row_block), c.kv_len, 0.0F);
      }
    }
  }

  // Head after head, and so many rows after others, as their scores are kept.
  __attribute__((noinline)) void attend_and_weigh(const kernel_task& all) const {
    clear_columns(all);
    kernel_task t = all;
    t.kept = static_cast<char*>(t.scratch) + plan.kept_at;
    t.next = nullptr;
    const int64_t whole_end = all.row_end == c.rows ? c.rows - plan.last_rows : all.row_end;
    for (; t.kv_head_begin < all.kv_head_end; ++t.kv_head_begin) {
      t.kv_head_end = t.kv_head_begin + 1;
      for (t.row_begin = all.row_begin; t.row_begin < all.row_end; t.row_begin = t.row_end) {
        t.row_end = t.row_begin + plan.kept_rows - plan.last_rows;
        if (t.row_end >= whole_end) t.row_end = all.row_end;
        t.kept_first = t.row_begin;
        for (t.chunk = 0; t.chunk < plan.chunks; ++t.chunk) attend(t);
        kernels.weights(&c, &t);
      }
    }
  }

  __attribute__((noinline)) void attend_and_keep(kernel_task& t) const {
    if (plan.keeps == keeping::of_task) return attend_and_weigh(t);
    keep_of_all(t);
    attend(t);
  }
};

// Masks that heads share, for all of them. About 16000 pairs an item.
__attribute__((noinline)) void look_at_masks(const job& j, int64_t threads, const mh_exec& exec,
                                             const watched_call& watched) {
  const kernel_call& c = j.c;
  const auto look_at = [&](const openings& open, task_fn look) {
    if (open.words == nullptr) return;
    const int64_t all = c.q_len;
    const int64_t some = opening_queries * std::clamp<int64_t>(16384 / (opening_queries * c.kv_len), 1, 8);
    const row_blocks of = open.query_words == 0 ? row_blocks{1, all, all} : row_blocks{blocks(all, some), some, all};
    const int64_t workers = open.query_words == 0 ? 1 : threads;
    for_each(entries_of(c, open) * of.count, workers, exec, watched, phase_mask, [&](const turn& now) {
      kernel_task t{};
      t.batch = now.index / of.count;
      of.put(now.index % of.count, t);
      look(&c, &t);
    });
  };
  look_at(c.mask_open, j.kernels.open_mask);
  look_at(c.bias_open, j.kernels.open_bias);
  look_at(c.key_mask_open, j.kernels.open_key_mask);
}

void first_pass(const job& j, int64_t threads, const mh_exec& exec, const watched_call& watched) {
  const plan& plan = j.plan;
  const schedule order(plan, threads);
  // Tasks of a decode step in runs: each waits for the first rows of its keys, unless the one before asked for them.
  const dealing how{step_of(plan, order.tasks(), threads), order.in_shares(), plan.kernel == route_decode};
  for_each(
      order.tasks(), threads, exec, watched, phase_count,
      [&](const turn& now) {
        kernel_task t = order.at(now.index);
        t.scratch = j.slot(now.worker);
        const kernel_task following = now.next >= 0 ? order.at(now.next) : kernel_task{};
        t.next = now.next >= 0 ? &following : nullptr;
        t.clock = now.watched->clock_of(t);
        if (plan.keeps == keeping::nothing) return j.attend(t);
        j.attend_and_keep(t);
      },
      how);
}

// What outputs besides lse take after the first pass.
__attribute__((noinline)) void later_passes(const job& j, void* column_sums, int64_t threads, const mh_exec& exec,
                                            const watched_call& watched) {
  const plan& plan = j.plan;
  const problem& p = plan.p;
  const row_blocks weighed{plan.weighed_blocks, plan.weighed_rows, j.c.rows};
  for_each(weights_tasks(plan), threads, exec, watched, phase_weights, [&](const turn& now) {
    kernel_task t = j.rows_at(now, weighed, means(p));
    j.keep_of_all(t);
    j.clear_columns(t);
    j.kernels.weights(&j.c, &t);
  });
  if (p.has_output(MH_OUTPUT_SCORES)) {
    const kernel_call scores = scores_call(plan, j.c);
    const row_blocks of_scores = scores_blocks(plan);
    for_each(scores_tasks(plan), threads, exec, watched, phase_weights, [&](const turn& now) {
      const kernel_task t = j.rows_at(now, of_scores, false);
      j.kernels.scores(&scores, &t);
    });
  }
  if (p.has_output(MH_OUTPUT_COLUMN_SUMS)) {
    for_each(p.batch * p.heads, threads, exec, watched, phase_weights, [&](const turn& now) {
      if (p.is_f64()) {
        add_columns(j.c, p, static_cast<double*>(column_sums), now.index);
      } else {
        add_columns(j.c, p, static_cast<float*>(column_sums), now.index);
      }
    });
  }
}

// A cache may be much longer than what is in use or has been reached: chunks that no batch entry's queries attend are left out.
int64_t chunks_in_use(const plan& plan, const mh_tensors& t) {
  const problem& p = plan.p;
  const bool lengths = p.has_input(MH_INPUT_SEQUSED_K), offsets = p.has_input(MH_INPUT_Q_OFFSET);
  if (plan.chunks == 1 || p.extra_keys > 0 || !(lengths || p.causal || p.window_right >= 0)) return plan.chunks;
  // Weights of rows far from 0 are more exact without a split (kernels/kept.hpp), which must not depend on the other entries.
  if (plan.call.may_lie_far && plan.keeps != keeping::nothing) return plan.chunks;
  int64_t keys = 1;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t used = lengths ? index_at(t.seqused_k, p.index_type, b) : p.kv_len;
    const int64_t offset =
        offsets ? index_at(t.q_offset, p.index_type, b) : offset_of(p.align, used, p.q_len, p.q_offset);
    const int64_t first = std::clamp<int64_t>(reach_of(p, offset).begin, 0, used);
    const int64_t end = std::min(used, reach_of(p, offset + p.q_len - 1).end);
    keys = std::max(keys, end - chunks_from(p, first, plan.block_kv));
  }
  return std::min(plan.chunks, blocks(keys, plan.chunk_keys));
}

}  // namespace

int32_t thread_count(const plan& plan, int32_t threads) {
  if (plan.is_short()) return 1;
  const int64_t most = std::max<int64_t>({most_tasks(plan), weights_tasks(plan), scores_tasks(plan), 1});
  return static_cast<int32_t>(std::min<int64_t>(wanted_threads(threads), most));
}

int64_t workspace_bytes(const plan& plan, int32_t threads) {
  if (plan.tasks == 0 && plan.shared_bytes == 0) return 0;
  int64_t bytes = 0;
  if (__builtin_mul_overflow(thread_count(plan, threads), round_up(plan.scratch_bytes, 64), &bytes) ||
      __builtin_add_overflow(bytes, plan.shared_bytes, &bytes)) {
    return INT64_MAX;  // which nobody has
  }
  return bytes;
}

void run(const plan& plan, const mh_tensors& tensors, const mh_exec& exec, const watched_call* within) {
  if (const int64_t chunks = chunks_in_use(plan, tensors); chunks < plan.chunks)
    return run(with_chunks(plan, chunks), tensors, exec, within);
  const int64_t threads =
      plan.is_short() ? 1 : std::min<int64_t>(thread_count(plan, exec.threads), usable_threads(exec));
  workspace memory(workspace_bytes(plan, exec.threads), exec);
  const watched_call watched(plan, threads, within);
  const auto some = [&](int64_t bytes) { return bytes > 0 ? memory.take(bytes) : nullptr; };
  kernel_call last;
  job j{plan,    plan.table->dtype[plan.p.dtype],  some(plan.kept_bytes),
        nullptr, round_up(plan.scratch_bytes, 64), plan.call,
        &last};
  kernel_call& c = j.c;
  set_tensors(c, tensors);
  c.partial_out = some(plan.partial_out_bytes);
  c.partial_states = reinterpret_cast<double*>(some(plan.partial_state_bytes));
  c.column_partials = some(plan.column_bytes);
  if (plan.openings_bytes > 0) place_openings(c, memory.take(plan.openings_bytes));
  j.slots = memory.take(0);
  if (plan.last_rows > 0) last = last_call(plan, c);
  if (plan.openings_bytes > 0) look_at_masks(j, threads, exec, watched);
  first_pass(j, threads, exec, watched);
  if (plan.chunks > 1) merge_chunks(plan, c, threads, exec, watched);
  if (has_second_pass(plan.p)) later_passes(j, tensors.column_sums, threads, exec, watched);
}

void parallel_for(int64_t n, int64_t workers, const mh_exec& exec, const watched_call& watched, phase what, item_fn fn,
                  void* arg, bool shares) {
  for_each(
      n, workers, exec, watched, what, [=](const turn& now) { fn(arg, now.index, now.worker); },
      dealing{1, shares, false});
}

}  // namespace manyhead
