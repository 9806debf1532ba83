// See schedule.hpp. The choices, and why:
//
// Size of a task: a row block (plan.cpp), so that a tile of K and V is read (or converted) once for its panels; fewer
//   panels, down to one, where a worker would get fewer than eight panels in all. Where each task brings tiles into an
//   order or type of its own, which takes as long as one or two panels, eight go together where each worker then gets as
//   many of such tasks, two or more, or else four while a worker has four tasks. One to four heads of 256 to 2048 tokens,
//   on two threads 1.07 to 1.25 times as fast as with four, on AMX, and 1.02 to 1.16 on AVX-512 in 16 bits; whole blocks
//   on one thread 1.04 to 1.2. A panel is the grain: cut further it would not fill the registers of the micro-kernel.
// A decode step's tasks take several kv heads where the plan allows it and each worker gets eight of them; where heads take
//   turns, the more of them the better, so one, and up to four times as many where workers then get as many each: on two
//   threads two, four and eight each were 0.96, 0.95 and 0.9 times as fast, 1500 keys, in three chunks, with one 0.9. Where
//   the last chunk is short its keys count, not its tasks: 520 keys, of two chunks, 1.65 to 1.97 times as fast on two threads.
// Order: heads one after another, so that K and V stay in cache, and in each head the longest task first. So the work
//   ends with the short tasks of the last head, and where these are too few to level the load, of the last several. Where
//   all tasks cost the same, or each worker has a share of whole heads of unlike tasks, one head after another to the end.
// Tasks that make weights are the plan's, the longest first as well.
// One worker has no load to level: blocks stay whole, heads follow each other. On two the rows of workloads.txt are as
// fast as with whole blocks.
#include "schedule.hpp"

#include <algorithm>
#include <queue>

#include "attended.hpp"
#include "blocks.hpp"
#include "check.hpp"
#include "layout.hpp"

namespace manyhead {
namespace {

constexpr int64_t panels_per_worker = 8, heads_per_worker = 8;
// Tasks of so many panels where a worker has so many of them.
struct grain {
  int64_t panels, tasks_per_worker;
};
constexpr grain coarse{8, 2}, fine{4, 4};
constexpr int64_t last_tasks_per_worker = 8;
constexpr int64_t heads_of_share = 4;          // or more, and as many for all, where tasks of a head differ
constexpr double most_flops_per_number = 512;  // of all that is read and written
// What a row costs whatever its keys, as so many keys: packing Q, and dividing, transposing and storing the result.
// Measured: 5 to 9 keys of size 64, 15 to 30 of size 128 (AVX-512 and AVX2).
constexpr int64_t row_cost_keys = 16;
// What making a weight costs, as so many pairs: 0.3 to 0.5 of head size 64 (docs/performance.md).
constexpr double weight_cost = 0.4;
// Beyond this many tasks they are not played through (tens of milliseconds), and the bound for any order is told.
constexpr int64_t most_played = int64_t{1} << 18;

struct division {
  int64_t quotient, rest;
};
division divide(int64_t n, int64_t by) {  // n >= 0
  if (by == 1) return {n, 0};
  if (n < by) return {0, n};
  return {n / by, n % by};
}

// Into how many tasks a block of rows is cut.
int64_t pieces_of(int64_t rows, int64_t piece_rows) { return std::max<int64_t>(blocks(rows, piece_rows), 1); }

// Whether workers get as many of them each, within a twentieth.
bool is_level(int64_t tasks, int64_t workers) { return blocks(tasks, workers) * workers * 20 <= tasks * 21; }

// The same of tasks of a chunk of keys each, `parts` a chunk, of which the last may have fewer keys: handed out longest first.
bool chunks_are_level(const plan& plan, int64_t parts, int64_t workers) {
  const int64_t rest = plan.chunks <= 1 ? 0 : plan.p.kv_len % plan.chunk_keys, whole = parts * (plan.chunks - 1);
  if (rest == 0 || whole >= 20 * workers) return is_level(parts * plan.chunks, workers);
  const division each = divide(whole, workers);
  struct {
    int64_t keys, workers;
  } less{each.quotient * plan.chunk_keys, workers - each.rest}, more{less.keys + plan.chunk_keys, each.rest};
  for (int64_t left = parts; left > 0;) {
    auto& next = more.workers > 0 && more.keys < less.keys ? more : less;
    next.keys += rest;
    left -= next.workers;
  }
  const int64_t most = more.workers > 0 ? std::max(less.keys, more.keys) : less.keys;
  return most * workers * 20 <= (whole * plan.chunk_keys + parts * rest) * 21;
}

bool last_rows_longest(const problem& p) { return p.causal || p.window_right >= 0; }

// How many of the last heads' tasks are taken together, so that short ones come last.
int64_t heads_together(const task_cut& c, int64_t workers) {
  if (workers == 1 || c.head_tasks == 0) return 1;
  return std::clamp<int64_t>(blocks(last_tasks_per_worker * workers, c.head_tasks), 1, std::max<int64_t>(c.heads, 1));
}

// Of tasks that make weights of the scores that they keep, each against all keys (plan.hpp: keeps). The same ones for any number
// of workers: queries of a group of 5 do not end where panels do, and four last vectors, cut, would be other panels.
task_cut cut_to_weigh(const plan& plan, int64_t workers) {
  task_cut c{};
  c.together = means(plan.p) ? plan.p.kv_heads : 1;
  c.entry_parts = plan.p.kv_heads / c.together;
  c.heads = plan.p.batch * c.entry_parts;
  c.piece_rows = plan.weighed_rows;
  c.head_pieces = c.head_tasks = plan.weighed_blocks;
  c.last_longest = last_rows_longest(plan.p);
  if (!has_even_rows(plan.p)) c.interleaved = heads_together(c, workers);
  return c;
}

}  // namespace

task_cut cut_for(const plan& plan, int64_t workers) {
  if (plan.keeps == keeping::of_task) return cut_to_weigh(plan, workers);
  task_cut c{};
  const int64_t kv_heads = plan.entry_heads;
  const int64_t parts_per_worker = takes_turns(plan) ? 1 : heads_per_worker;
  const int64_t fair_heads = divide(plan.entries * kv_heads * plan.chunks, parts_per_worker * workers).quotient;
  const int64_t at_once = workers == 1 ? plan.heads_at_once : std::clamp<int64_t>(fair_heads, 1, plan.heads_at_once);
  int64_t parts = blocks(kv_heads, at_once);
  const auto levels = [&](int64_t n) {
    return chunks_are_level(plan, plan.entries * blocks(kv_heads, blocks(kv_heads, n)), workers);
  };
  for (int64_t n = parts; takes_turns(plan) && workers > 1 && n <= std::min(4 * parts, kv_heads); ++n) {
    if (!levels(n)) continue;
    parts = n;
    break;
  }
  c.together = blocks(kv_heads, parts);
  c.entry_parts = blocks(kv_heads, c.together);
  c.heads = plan.entries * c.entry_parts;
  const int64_t rows = plan.p.rows() - plan.last_rows, panel = plan.panel_rows;
  const int64_t all_panels = c.heads * blocks(rows, panel) * plan.chunks;
  const int64_t block_panels = blocks(plan.block_q, panel);
  const auto cut = [&](int64_t most) {
    // Rows that a step works on together decide the order of their sums (decode_pairs.hpp).
    if (plan.unit_steps) most = block_panels;
    c.piece_rows = panel * blocks(block_panels, blocks(block_panels, std::clamp<int64_t>(most, 1, block_panels)));
    c.block_pieces = pieces_of(plan.block_q, c.piece_rows);
    c.last_pieces = pieces_of(rows - (plan.row_blocks - 1) * plan.block_q, c.piece_rows);
    c.head_pieces = rows == 0 ? 0 : (plan.row_blocks - 1) * c.block_pieces + c.last_pieces;
    c.head_tasks = c.head_pieces * plan.chunks;
  };
  const int64_t fair = divide(all_panels, panels_per_worker * workers).quotient;
  const auto together = [&](const grain& g) {
    return std::max(fair, std::min(g.panels, all_panels / (g.tasks_per_worker * workers)));
  };
  const bool brings_tiles = plan.kernel == route_matrix || plan.copy_kv;
  cut(workers == 1 ? block_panels : brings_tiles ? together(coarse) : fair);
  if (workers > 1 && brings_tiles && !is_level(c.heads * c.head_tasks, workers)) cut(together(fine));
  c.last_longest = last_rows_longest(plan.p);
  const bool even = has_even_rows(plan.p);
  c.in_shares = workers > 1 && workers >= plan.share_threads &&
                (even || (c.heads >= heads_of_share * workers && is_level(c.heads, workers)));
  const auto alike = [&] {
    return even && plan.block_q % c.piece_rows == 0 && rows % c.piece_rows == 0 &&
           (plan.chunks <= 1 || plan.p.kv_len % plan.chunk_keys == 0);
  };
  if (!alike() && (even || !c.in_shares)) c.interleaved = heads_together(c, workers);
  return c;
}

schedule::schedule(const plan& plan, int64_t workers)
    : plan_(plan),
      workers_(std::max<int64_t>(workers, 1)),
      cut_(workers_ == 1 ? plan.alone : cut_for(plan, workers_)) {}

schedule::place schedule::place_of(int64_t index) const {
  const int64_t first = (cut_.heads - cut_.interleaved) * cut_.head_tasks;
  if (index < first || cut_.interleaved == 1) {
    const division at = divide(index, cut_.head_tasks);
    return {at.quotient, at.rest};
  }
  const division at = divide(index - first, cut_.interleaved);
  return {cut_.heads - cut_.interleaved + at.rest, at.quotient};
}

// t: zeros so far, but for its heads.
void schedule::put_rows(int64_t position, kernel_task& t) const {
  const int64_t all_rows = plan_.call.rows;
  if (cut_.head_tasks == 1) {
    t.row_end = all_rows;
    return;
  }
  const bool weighs = plan_.keeps == keeping::of_task;  // of all keys
  const int64_t chunks = weighs ? 1 : plan_.chunks;
  t.chunk = chunks > 1 ? position % chunks : 0;
  int64_t piece = chunks > 1 ? position / chunks : position;
  if (cut_.last_longest) piece = cut_.head_pieces - 1 - piece;
  if (weighs) return row_blocks{cut_.head_pieces, cut_.piece_rows, all_rows}.put(piece, t);
  t.row_block = plan_.row_blocks > 1 ? std::min(piece / cut_.block_pieces, plan_.row_blocks - 1) : 0;
  piece -= t.row_block * cut_.block_pieces;
  const int64_t block_begin = t.row_block * plan_.block_q;
  const int64_t whole = all_rows - plan_.last_rows;
  const int64_t rows = std::min(plan_.block_q, whole - block_begin);
  // Kernels whose widest panel is three vectors cut the last four vectors of rows into two and two (panel_vectors):
  // where a border would leave one vector, it lies one vector before.
  const auto border = [&](int64_t i) {
    const int64_t lanes = plan_.lanes(), at = i * cut_.piece_rows;
    const bool one_left = i > 0 && at < rows && rows - at <= lanes && plan_.panel_rows == 3 * lanes;
    return std::min(rows, one_left ? at - lanes : at);
  };
  t.row_begin = block_begin + border(piece);
  t.row_end = block_begin + border(piece + 1);
  if (t.row_end == whole) t.row_end = all_rows;
}

void schedule::put_heads(int64_t head, kernel_task& t) const {
  const division at = divide(head, cut_.entry_parts);
  t.batch = at.quotient;
  t.kv_head_begin = at.rest * cut_.together;
  t.kv_head_end = std::min(t.kv_head_begin + cut_.together, plan_.entry_heads);
}

kernel_task schedule::at(int64_t index) const {
  const place at = place_of(index);
  kernel_task t{};
  put_heads(at.head, t);
  put_rows(at.position, t);
  return t;
}

double schedule::cost_of(int64_t position) const {
  kernel_task t{};
  put_rows(position, t);
  const problem& p = plan_.p;
  const int64_t panel = plan_.panel_rows, lanes = plan_.lanes();
  const bool weighs = plan_.keeps == keeping::of_task;
  const int64_t chunk_begin =
      weighs ? 0 : chunks_from(p, attended_keys(p, 0).begin, plan_.block_kv) + t.chunk * plan_.chunk_keys;
  const int64_t chunk_end = weighs ? p.kv_len : chunk_begin + plan_.chunk_keys;
  const int64_t last = t.row_end == p.rows() ? plan_.last_rows : 0, whole = t.row_end - last;
  double cost = 0;
  for (int64_t row = t.row_begin; row < t.row_end;) {
    const int64_t end = row < whole ? std::min(row + panel, whole) : t.row_end;
    const int64_t last_key = attended_keys(p, (end - 1) / p.group()).end;
    const int64_t keys = std::min(p.extra_keys > 0 ? p.kv_len : last_key, chunk_end) -
                         std::max(attended_keys(p, row / p.group()).begin, chunk_begin);
    const double rows =
        row < whole ? static_cast<double>(blocks(end - row, lanes) * lanes) : 1.5 * static_cast<double>(last);
    cost += rows * static_cast<double>(std::max<int64_t>(keys, 0) + row_cost_keys);
    if (weighs) cost += weight_cost * static_cast<double>((end - row) * p.kv_len);
    row = end;
  }
  return cost;
}

std::vector<double> schedule::costs() const {
  std::vector<double> of_head, all;
  for (int64_t i = 0; i < cut_.head_tasks; ++i) of_head.push_back(cost_of(i));
  for (int64_t i = 0; i < tasks(); ++i) {
    const place at = place_of(i);
    kernel_task t{};
    put_heads(at.head, t);
    all.push_back(of_head[static_cast<size_t>(at.position)] * static_cast<double>(t.kv_head_end - t.kv_head_begin));
  }
  return all;
}

double schedule::balance() const {
  if (tasks() == 0 || workers_ == 1) return 1;
  if (tasks() > most_played) {
    double longest = 0, sum = 0;
    const int64_t step = cut_.head_tasks / most_played + 1;  // of very many tasks one stands for its neighbours
    for (int64_t i = 0; i < cut_.head_tasks; i += step) {
      const double cost = cost_of(i);
      longest = std::max(longest, cost * static_cast<double>(cut_.together));
      sum += cost * static_cast<double>(plan_.p.batch * plan_.p.kv_heads * std::min(step, cut_.head_tasks - i));
    }
    return 1 + longest * static_cast<double>(workers_ - 1) / sum;
  }
  std::priority_queue<double, std::vector<double>, std::greater<>> loads;
  for (int64_t i = 0; i < workers_; ++i) loads.push(0);
  double busiest = 0, sum = 0;
  for (const double cost : costs()) {
    const double load = loads.top() + cost;
    loads.pop();
    loads.push(load);
    busiest = std::max(busiest, load);
    sum += cost;
  }
  return busiest * static_cast<double>(workers_) / sum;
}

// Shares pay where cores find their own in L2 in the next call, if but half of it, where reading takes time beside the
// arithmetic, and where tasks cost about the same, as what is left of a share comes no longer longest first. On 16 cores with 2 MB
// of L2 each, against all tasks in order: one row and 1024 keys 1.25 to 1.5 times as fast, 16 x 16 1.3 to 1.5, sentences of
// 32 tokens 1.1 to 1.5, of 128 1.03 to 1.2, 384 tokens 1.0 to 1.4. Not so: of four times what the caches hold 0.86 to 0.91,
// 448 x 1500 0.88 to 1.0, causal prompts 0.81 to 1.0. On two cores 0.97 to 1.04.
// Where heads lie side by side, a core that asks ahead brings lines of another one's, and takes those that it writes: there
// from any memory, causal too if each thread gets several heads (heads_of_share). On two cores, 16 x 64 to 256 x 256, 8 to 137
// MB, 1.04 to 1.4 (results alone side by side 1.15 to 1.41, the rest alone 1.07 to 1.15), 384 and more 0.94 to 1.05, steps
// 0.99 to 1.0.
int64_t share_threads_of(const plan& plan, double bytes, int64_t l2_bytes) {
  const double numbers = bytes / static_cast<double>(dtype_size(plan.p.dtype));
  if (plan.flops > most_flops_per_number * numbers) return INT64_MAX;
  if (plan.kernel != route_decode && (are_side_by_side(plan.p) || writes_side_by_side(plan.p)) &&
      plan.flops <= most_flops_per_number / 2 * numbers) {
    return 1;
  }
  if (!has_even_rows(plan.p)) return INT64_MAX;
  return static_cast<int64_t>(bytes / (2 * static_cast<double>(l2_bytes))) + 1;
}

int64_t most_tasks(const plan& plan) { return schedule(plan, int64_t{1} << 30).tasks(); }

}  // namespace manyhead
