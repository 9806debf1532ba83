// How plans are cut into tasks for any number of threads, in which order these are taken, and by whom.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <fstream>
#include <functional>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "core_test.hpp"
#include "deal.hpp"
#include "machine.hpp"
#include "schedule.hpp"

namespace manyhead::test {
namespace {

// --- the schedule ----------------------------------------------------------------------------------------------------

TEST_CASE("the last rows of a head take the decode route where they would fill little of a panel") {
  const auto last_rows = [](const kernel_table* table, const std::string& line, cpu_core core = cpu_core::other) {
    return make_plan(problem_of(line), *table, l2, core).last_rows;
  };
  for (const kernel_table* table : tables()) {
    CAPTURE(table->isa);
    const int64_t lanes = table->lanes, one = lanes > 4 ? 1 : 0;
    const auto f32 = [&](int64_t q, const char* more) { return "f32 b2 h4 q" + std::to_string(q) + " kv60" + more; };
    CHECK(last_rows(table, f32(3 * lanes + 1, " d64")) == one);
    CHECK(last_rows(table, "f64 b2 h4 q" + std::to_string(3 * lanes + 1) + " kv60 d64") == (lanes > 8 ? 1 : 0));
    CHECK(last_rows(table, f32(3 * lanes, " d64")) == 0);
    CHECK(last_rows(table, f32(4 * lanes - 1, " d64")) == 0);
    // Of groups the rows count, not the queries.
    CHECK(last_rows(table, "f32 b2 h12/4 q" + std::to_string(lanes + 1) + " kv60 d64") == 3 * one);
    CHECK(last_rows(table, f32(3 * lanes + 1, " d64 weights")) == one);
    CHECK(last_rows(table, f32(3 * lanes + 1, " d64 lse")) == one);
    // Rows shorter than a vector would be copied once more.
    CHECK(last_rows(table, f32(3 * lanes + 1, " d3")) == 0);
    if (lanes == 16) {
      for (const int64_t few : {1, 5, 6, 7, 9, 10, 15}) {
        CHECK(last_rows(table, f32(48 + few, " d64")) == (few <= 6 ? few : 0));
        CHECK(last_rows(table, f32(48 + few, " d64"), cpu_core::zen4) == (few <= 9 ? few : 0));
      }
    }
    if (table->dtype[MH_DTYPE_BF16].attention[route_matrix] != nullptr) {
      CHECK(last_rows(table, "bf16 b1 h4 q97 kv97 d64") == one);
      const bool by_pairs = table->dtype[MH_DTYPE_BF16].unit_steps == steps_of_pairs;
      CHECK(last_rows(table, "bf16 b1 h4 q112 kv112 d64") == (by_pairs ? 16 : 0));
      CHECK(last_rows(table, "bf16 b1 h4 q120 kv112 d64") == (by_pairs ? 24 : 0));
      CHECK(last_rows(table, "bf16 b1 h4 q121 kv112 d64") == 0);
      CHECK(last_rows(table, "bf16 b1 h4 q113 kv112 d80") == (by_pairs ? 17 : 0));
      CHECK(last_rows(table, "bf16 b1 h4 q114 kv112 d80") == 0);
    }
  }
}

TEST_CASE("a schedule cuts row blocks at the borders of their panels, and covers each row once") {
  for (const kernel_table* table : tables()) {
    const int64_t lanes = table->lanes;
    for (const int64_t q : {1, 2, 9, 47, 48, 49, 64, 65, 100, 129, 192, 193, 207, 256, 577, 1024}) {
      for (const char* options :
           {" kv20 d64", " kv300 d64", " kv300 d64 causal align=tl", " kv4000 d64 causal align=br"}) {
        const problem p = problem_of("f32 b2 h6/3 q" + std::to_string(q) + options);
        const plan plan = make_plan(p, *table, l2);
        const int64_t rows = p.group() * q, whole = rows - plan.last_rows, panel = plan.panel_rows;
        // Where the panels of an uncut block begin: the widest ones, but the last four vectors as two and two.
        std::vector<bool> borders(static_cast<size_t>(rows + 1));
        for (int64_t block = 0; block < whole; block += plan.block_q) {
          const int64_t end = std::min(block + plan.block_q, whole);
          for (int64_t row = block; row < end;) {
            borders[static_cast<size_t>(row)] = true;
            const int64_t vectors = (end - row + lanes - 1) / lanes;
            row += vectors == 4 && panel == 3 * lanes ? 2 * lanes : panel;
          }
        }
        for (const int64_t workers : {1, 2, 3, 16, 64, 1000000}) {
          const schedule order(plan, workers);
          CHECK(order.tasks() <= most_tasks(plan));
          std::vector<int> done(static_cast<size_t>(2 * 3 * plan.chunks * rows));
          for (int64_t i = 0; i < order.tasks(); ++i) {
            const kernel_task t = order.at(i);
            const int64_t heads = t.kv_head_end - t.kv_head_begin;
            REQUIRE((t.batch >= 0 && t.batch < plan.entries && t.kv_head_begin >= 0 && heads >= 1 &&
                     t.kv_head_end <= plan.entry_heads && heads <= plan.heads_at_once && t.chunk >= 0 &&
                     t.chunk < plan.chunks));
            REQUIRE((t.row_begin < t.row_end && t.row_begin < whole && t.row_end <= rows &&
                     std::min(t.row_end, whole) - t.row_begin <= plan.block_q));
            CHECK(borders[static_cast<size_t>(t.row_begin)]);
            for (int64_t head = t.kv_head_begin; head < t.kv_head_end; ++head) {
              for (int64_t row = t.row_begin; row < t.row_end; ++row)
                ++done[static_cast<size_t>(((t.batch * plan.entry_heads + head) * plan.chunks + t.chunk) * rows + row)];
            }
          }
          CHECK(std::all_of(done.begin(), done.end(), [](int n) { return n == 1; }));
        }
      }
    }
  }
}

TEST_CASE("heads of few rows and keys share tasks, as long as each worker gets eight") {
  const auto heads_at_once = [](const char* line) { return plan_of(line).heads_at_once; };
  // Tiles of K and V in half of L2 where all of them are in L2, else whole heads that fit into L1; 32 rows.
  CHECK(heads_at_once("f32 b1 h12 q1 kv8 d64") == 12);
  CHECK(heads_at_once("f32 b1 h32 q4 kv8 d64") == 8);
  if (current_isa().lanes >= 8) CHECK(heads_at_once("f32 b1 h32/8 q2 kv8 d64") == 4);  // else 8 rows do not decode
  CHECK(heads_at_once("f32 b1 h12 q1 kv128 d64") == l2 / 2 / (128 * 128 * 4));
  CHECK(heads_at_once("bf16 b1 h24 q1 kv128 d64") == l2 / 2 / (128 * 128 * 2));
  CHECK(heads_at_once("f32 b64 h32 q1 kv16 d64") == 4);
  CHECK(heads_at_once("f32 b64 h32 q1 kv65 d16") == 3);
  CHECK(heads_at_once("f32 b64 h32 q4 kv65 d16") == 1);
  CHECK(heads_at_once("f32 b1 h12 q64 kv64 d64") == 1);
  const plan plan = plan_of("f32 b8 h24 q1 kv8 d64");
  REQUIRE(plan.heads_at_once == 32);
  const auto tasks = [&](int64_t workers) { return schedule(plan, workers).tasks(); };
  CHECK(tasks(1) == 6);
  CHECK(tasks(2) == 16);  // of 12 heads each
  CHECK(tasks(4) == 32);
  CHECK(tasks(24) == 8 * 24);
}

TEST_CASE("a decode step takes the heads of all batch entries as of one where nothing tells entries apart") {
  const auto entries = [](const char* line) {
    const plan p = plan_of(line);
    CHECK(p.entries * p.entry_heads == p.p.batch * p.p.kv_heads);
    CHECK(p.call.batch == p.entries);
    CHECK(p.call.kv_heads == p.entry_heads);
    CHECK(p.call.heads == p.entry_heads * p.p.group());
    return p.entries;
  };
  CHECK(entries("f32 b8 h1 q1 kv8 d64") == 1);
  CHECK(entries("f32 b8 h1 q1 kv8 d64 bshd") == 1);
  CHECK(entries("f32 b8 h4/2 q2 kv8 d64 lse") == 1);
  CHECK(entries("f32 b8 h4/1 q1 kv8 d64 lse") == 1);
  CHECK(entries("f32 b8 h1 q2 kv8 d64 causal align=br window=4,0") == 1);
  CHECK(entries("f32 b8 h2 q1 kv8 d64 mask") == 1);
  // Heads that do not follow, or that a step's inputs tell apart.
  CHECK(entries("f32 b8 h2 q2 kv8 d64 bshd") == 8);
  CHECK(entries("f32 b8 h2 q1 kv8 d64 strides=odd") == 8);
  for (const char* input : {"keymask", "lens", "offsets", "alibi align=br", "sinks"}) {
    CAPTURE(input);
    CHECK(entries(("f32 b8 h1 q1 kv8 d64 " + std::string(input)).c_str()) == 8);
  }
  for (const char* shared : {"mask bcast=b", "mask bcast=h", "bias bcast=b", "bias bcast=h"}) {
    CAPTURE(shared);
    CHECK(entries(("f32 b8 h2 q1 kv8 d64 " + std::string(shared)).c_str()) == 8);
  }
  CHECK(entries("f32 b8 h2 q1 kv8 d64 mask bias bcast=bh") == 1);
  // Of one array alone.
  const problem follows = problem_of("f32 b8 h2 q1 kv8 d64 lse");
  for (int64_t(problem::* strides)[4] :
       {&problem::q_strides, &problem::k_strides, &problem::v_strides, &problem::out_strides}) {
    problem p = follows;
    (p.*strides)[0] *= 2;
    CHECK(make_plan(p, current_isa(), l2).entries == 8);
  }
  problem p = follows;
  p.lse_strides[0] *= 2;
  CHECK(make_plan(p, current_isa(), l2).entries == 8);
  CHECK(entries("f32 b8 h1 q1 kv8 d64 weights") == 8);
  CHECK(entries("f32 b8 h1 q64 kv64 d64") == 8);
}

TEST_CASE("heads side by side take turns where K and V are not in L2, in as few tasks as level the load") {
  const auto turns = [](const char* line) { return takes_turns(plan_of(line)); };
  CHECK(turns("f32 b1 h12 q1 kv1024 d64 bshd"));
  CHECK(turns("bf16 b4 h12/4 q1 kv1024 d64 bshd"));
  CHECK(!turns("f32 b1 h12 q1 kv1024 d64"));
  CHECK(!turns("f32 b1 h12/1 q1 kv4096 d64 bshd"));
  CHECK(!turns("f32 b1 h12 q1 kv128 d64 bshd"));
  CHECK(!turns("f32 b1 h12 q64 kv1024 d64 bshd"));
  CHECK(!turns("f32 b1 h12 q1 kv1024 d64 strides=lastdim"));
  CHECK(!turns("f32 b1 h12 q1 kv1024 d64 strides=odd"));
  using keys = std::pair<int64_t, int64_t>;  // of K, of V
  const auto turns_of = [](const char* line, cpu_core core, int64_t l3) {
    const plan p = make_plan(problem_of(line), current_isa(), l2, core, l3);
    return keys{p.k_turn, p.v_turn};
  };
  constexpr keys usual{16, 32};
  // With vectors of four floats three rows of f64 and five are no decode step.
  const keys of_more = current_isa().lanes > 4 ? usual : keys{0, 0};
  CHECK(turns_of("f32 b1 h12 q1 kv8192 d64 bshd", cpu_core::other, l2) == usual);
  // From memory in its order: the shorter the longer the rows of all heads are, but not too short for more rows.
  const auto in_order = [&](const char* line) { return turns_of(line, cpu_core::zen5, l2); };
  CHECK(turns_of("f32 b1 h12 q1 kv8192 d64 bshd", cpu_core::zen5, 1024 * l2) == keys{64, 64});
  CHECK(turns_of("f32 b1 h12 q5 kv8192 d64 bshd", cpu_core::zen5, 1024 * l2) == of_more);
  CHECK(turns_of("f32 b1 h17 q1 kv8192 d64 bshd", cpu_core::zen5, 1024 * l2) == usual);
  CHECK(in_order("bf16 b1 h4/4 q1 kv8192 d64 bshd") == usual);
  CHECK(in_order("bf16 b1 h8/8 q1 kv8192 d64 bshd") == keys{16, 16});
  CHECK(in_order("bf16 b1 h8/8 q1 kv8192 d128 bshd") == keys{8, 8});
  CHECK(in_order("f32 b1 h12 q1 kv8192 d64 bshd") == keys{4, 4});
  // No less than a kilobyte of a head.
  CHECK(in_order("f32 b1 h32 q1 kv8192 d64 bshd") == keys{4, 4});
  CHECK(in_order("f32 b1 h16 q1 kv8192 d128 bshd") == keys{2, 2});
  CHECK(in_order("f32 b1 h32 q1 kv8192 d32 bshd") == keys{8, 8});
  CHECK(in_order("f32 b1 h8 q1 kv8192 d512 bshd") == keys{2, 2});
  CHECK(in_order("bf16 b1 h32 q1 kv8192 d64 bshd") == keys{8, 8});
  if (current_isa().lanes > 4) CHECK(in_order("f32 b1 h32 q4 kv8192 d32 bshd") == keys{8, 8});
  CHECK(in_order("f32 b1 h32 q2 kv8192 d128 bshd") == keys{2, 2});
  CHECK(in_order("f32 b1 h32 q3 kv8192 d128 bshd") == keys{8, 8});
  CHECK(in_order("f32 b1 h8 q4 kv8192 d128 bshd") == (current_isa().lanes >= 16 ? keys{4, 4} : keys{8, 8}));
  CHECK(in_order("f32 b1 h8 q3 kv8192 d128 bshd") == keys{8, 8});
  CHECK(in_order("f32 b1 h32 q4 kv8192 d128 bshd") == keys{8, 8});
  CHECK(in_order("bf16 b1 h16 q4 kv8192 d128 bshd") == keys{8, 8});
  CHECK(in_order("f32 b1 h32 q5 kv8192 d128 bshd") == of_more);
  CHECK(in_order("f64 b1 h32 q3 kv8192 d128 bshd") == of_more);
  CHECK(in_order("f32 b1 h12 q1 kv8192 d64 strides=packed") == keys{4, 4});
  CHECK(in_order("f32 b1 h32 q1 kv8192 d64 strides=packed") == usual);
  CHECK(plan_of("f32 b1 h12 q4 kv1024 d64 bshd").heads_at_once == 12);
  CHECK(plan_of("f32 b1 h64 q4 kv1024 d64 bshd").heads_at_once == 32);
  CHECK(plan_of("f32 b1 h200 q1 kv1024 d64 bshd").heads_at_once == 128);
  const auto tasks = [](const char* line, int64_t workers) { return schedule(plan_of(line), workers).tasks(); };
  CHECK(tasks("f32 b1 h12 q1 kv1024 d64 bshd", 1) == 2);      // chunks of 512 keys
  CHECK(tasks("f32 b1 h12 q1 kv2100 d64 bshd", 2) == 5);      // the fifth is a tenth of the others
  CHECK(tasks("f32 b1 h12 q1 kv1600 d64 bshd", 2) == 4 * 2);  // else one of two gets 1024 keys
  CHECK(tasks("f32 b1 h12 q1 kv600 d64 bshd", 2) == 2 * 2);
  CHECK(tasks("f32 b5 h12 q1 kv700 d64 bshd", 2) == 5 * 2);
  CHECK(tasks("f32 b1 h12 q1 kv1024 d64 bshd", 2) == 2);
  CHECK(tasks("f32 b1 h12 q1 kv1500 d64 bshd", 2) == 3 * 2);  // else one of two gets two of three
  CHECK(tasks("f32 b1 h12 q1 kv1500 d64 bshd", 3) == 3);
  CHECK(tasks("f32 b3 h12 q1 kv512 d64 bshd", 2) == 3 * 2);
  CHECK(tasks("f32 b1 h12 q1 kv1024 d64 bshd", 64) == 2 * 12);
  CHECK(tasks("f32 b1 h12 q1 kv65536 d64 bshd", 64) == 128);
}

TEST_CASE("heads side by side take turns in the caches where L1 would lose their rows before their time") {
  using keys = std::pair<int64_t, int64_t>;
  const auto turns_of = [](const char* line, int64_t l2_bytes, cpu_core core = cpu_core::zen5) {
    const plan p = make_plan(problem_of(line), current_isa(), l2_bytes, core, 1024 * l2);
    return keys{p.k_turn, p.v_turn};
  };
  constexpr int64_t large = 64 * l2;
  constexpr keys none{0, 0}, usual{16, 32};
  const bool wide = current_isa().lanes >= 16;
  // Rows of whole 4096 bytes.
  CHECK(turns_of("f32 b1 h16 q1 kv64 d64 bshd", large) == keys{8, 16});
  CHECK(turns_of("f32 b1 h8 q3 kv64 d128 bshd", large) == keys{8, 16});
  CHECK(turns_of("f32 b1 h16 q4 kv64 d64 bshd", large) == none);
  CHECK(turns_of("f32 b1 h16 q1 kv4096 d64 bshd", l2) == keys{8, 16});
  CHECK(turns_of("bf16 b1 h32 q1 kv64 d64 bshd", large) == usual);
  CHECK(turns_of("bf16 b1 h32 q2 kv64 d64 bshd", large) == none);
  // Of others.
  CHECK(turns_of("f32 b1 h12 q1 kv64 d64 bshd", large) == none);
  CHECK(turns_of("f32 b1 h12 q3 kv64 d64 bshd", large) == usual);
  CHECK(turns_of("bf16 b1 h12 q3 kv64 d64 bshd", large) == none);
  if (wide) {  // five rows are no decode step on less
    CHECK(turns_of("f32 b1 h16 q5 kv64 d64 bshd", large) == keys{8, 16});
    CHECK(turns_of("f32 b1 h12 q5 kv64 d64 bshd", large) == usual);
    CHECK(turns_of("f32 b1 h12 q6 kv64 d64 bshd", large) == none);
  }
  CHECK(turns_of("f32 b1 h16 q1 kv64 d64", large) == none);
  CHECK(turns_of("f32 b1 h16 q1 kv64 d64 bshd", large, cpu_core::other) == none);
}

TEST_CASE("on few threads heads come one after another, the longest task of each first") {
  const plan plan = plan_of("f32 b1 h8 q2048 kv2048 d64 causal");
  const schedule order(plan, 2);
  CHECK(order.tasks() == plan.tasks);
  for (int64_t i = 1; i < order.tasks(); ++i) {
    const kernel_task before = order.at(i - 1), task = order.at(i);
    CHECK((task.kv_head_begin > before.kv_head_begin || task.row_end == before.row_begin));
  }
}

TEST_CASE("tasks that make weights cover each row once, and of means whole queries of all heads") {
  for (const kernel_table* table : tables()) {
    for (const char* text :
         {"f32 b2 h6/3 q300 kv2500 d64 weights", "f32 b2 h6/2 q1300 kv1300 d64 causal meanw",
          "f32 b1 h71/1 q50 kv2500 d16 meanw", "f32 b2 h6/3 q301 kv2500 d64 colsums",
          "bf16 b2 h6/2 q2330 kv2330 d64 causal meanw", "f64 b1 h7 q2001 kv2001 d64 causal weights"}) {
      const plan plan = make_plan(problem_of(text), *table, l2);
      const problem& p = plan.p;
      REQUIRE(plan.keeps == keeping::of_task);
      const int64_t rows = p.rows();
      const int64_t tasks = schedule(plan, 1).tasks();
      for (const int64_t workers : {1, 2, 16, 1000}) {
        INFO(std::string(text), " ", std::string(table->isa), " ", workers);
        const schedule order(plan, workers);
        REQUIRE(order.tasks() == tasks);
        std::vector<int> done(static_cast<size_t>(p.batch * p.kv_heads * rows));
        for (int64_t i = 0; i < tasks; ++i) {
          const kernel_task t = order.at(i);
          REQUIRE((t.batch >= 0 && t.batch < p.batch && t.chunk == 0));
          REQUIRE((t.row_begin >= 0 && t.row_begin < t.row_end && t.row_end <= rows));
          const int64_t heads = t.kv_head_end - t.kv_head_begin;
          CHECK(heads == (means(p) ? p.kv_heads : 1));
          if (means(p)) CHECK((t.row_begin % p.group() == 0 && t.row_end % p.group() == 0));
          CHECK(t.row_begin == t.row_block * plan.weighed_rows);
          CHECK(t.row_end == (t.row_block + 1 < plan.weighed_blocks ? t.row_begin + plan.weighed_rows : rows));
          for (int64_t head = t.kv_head_begin; head < t.kv_head_end; ++head)
            for (int64_t row = t.row_begin; row < t.row_end; ++row)
              ++done[static_cast<size_t>((t.batch * p.kv_heads + head) * rows + row)];
        }
        CHECK(std::all_of(done.begin(), done.end(), [](int n) { return n == 1; }));
        const std::vector<double> costs = order.costs();
        CHECK(costs.size() == static_cast<size_t>(tasks));
        const double sum = std::accumulate(costs.begin(), costs.end(), 0.0);
        if (p.causal) CHECK(costs.back() * static_cast<double>(tasks) < sum);  // short ones come last
        CHECK(order.balance() >= 1);
      }
    }
  }
}

// The least load of the busiest worker over the mean that any order could reach, at the least: one worker gets k + 1 of
// the largest k * workers + 1 tasks.
double least_balance(std::vector<double> costs, int64_t workers) {
  std::sort(costs.begin(), costs.end(), std::greater<>());
  double sum = 0, least = 0;
  for (const double cost : costs) sum += cost;
  const auto step = static_cast<size_t>(workers);
  for (size_t k = 0; k * step < costs.size(); ++k) {
    double load = 0;
    for (size_t i = 0; i <= k; ++i) load += costs[k * step - i];
    least = std::max(least, load);
  }
  return std::max(1.0, least * static_cast<double>(workers) / sum);
}

// The rows of workloads.txt on machines that are larger than this one. A row has enough work for so many workers
// where each gets 20 MFLOP or reads 1 MB of K and V (a tenth of a millisecond and more), and four tasks of the smallest
// size (one panel, one chunk), and tasks of that size can be spread evenly at all. Not so: sdxl_self with AVX-512 on 256
// (3.4 panels of 48 rows each, 1.2 at best), gpt2_small on 128 (1.07), dec_mqa_16k on 64 (32 chunks of 512 keys; with
// chunks of 256 keys decoding was 3 to 18 % slower on two threads).
TEST_CASE("the load is balanced where there is enough work") {
  std::ifstream file(MH_WORKLOADS_FILE);
  std::vector<std::string> enough;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::string name;
    mh_problem p{};
    p.struct_size = sizeof p;
    words >> name >> p.batch >> p.heads >> p.kv_heads >> p.q_len >> p.kv_len >> p.head_dim >> p.causal;
    REQUIRE(bool(words));
    for (const kernel_table* table : tables()) {
      const plan plan = make_plan(validate(p), *table, int64_t{2} << 20);
      for (const int64_t workers : {64, 128, 256}) {
        const schedule order(plan, workers);
        const double balance = order.balance(), share = 1 / static_cast<double>(workers);
        const double least = least_balance(schedule(plan, int64_t{1} << 20).costs(), workers);
        CAPTURE(name);
        CAPTURE(describe(plan, false, workers));
        CHECK(balance >= 1);
        CHECK(balance <= 1.2 * least);
        if (plan.flops * share < 20e6 && plan.bytes * share < 1e6) continue;
        if (most_tasks(plan) < 4 * workers || least > 1.05) continue;
        CHECK(balance <= 1.051);
        enough.push_back(name + "@" + table->isa + "x" + std::to_string(workers));
      }
    }
  }
  // The rule lets the large rows in.
  const std::vector<const kernel_table*> all = tables();
  for (const char* isa : {"avx512", "avx2"}) {
    if (std::none_of(all.begin(), all.end(), [&](const kernel_table* t) { return isa == std::string(t->isa); }))
      continue;
    for (const char* row : {"llama8b_2k", "gpt3_512"})
      for (const char* workers : {"x64", "x128", "x256"})
        CHECK(std::count(enough.begin(), enough.end(), row + std::string("@") + isa + workers) == 1);
    for (const char* row : {"sdxl_self@", "dec_llama_32k@"})
      for (const char* workers : {"x64", "x128"})
        CHECK(std::count(enough.begin(), enough.end(), row + std::string(isa) + workers) == 1);
    for (const char* row : {"gpt2_small@", "gpt2_large@", "dec_llama_b8@"})
      CHECK(std::count(enough.begin(), enough.end(), row + std::string(isa) + "x64") == 1);
  }
}

TEST_CASE("the balance of more tasks than are played through is bounded") {
  const plan small = plan_of("f32 b1 h8 q4096 kv4096 d64 causal");
  const plan large = plan_of("f32 b1000 h96 q4096 kv4096 d64 causal");
  CHECK(schedule(small, 1).balance() == 1);
  CHECK(schedule(small, 16).balance() < 1.05);
  CHECK((schedule(large, 256).balance() >= 1 && schedule(large, 256).balance() < 1.01));
  CHECK(schedule(plan_of("f32 b1 h8 q0 kv10 d64"), 4).balance() == 1);
}

TEST_CASE("threads have shares where cores keep their own in cache, or write beside each other") {
  const auto threads = [](const char* line) { return plan_of(line).share_threads; };
  // 2 x 12 x 1024 x 64 x 4 bytes and a little, in twice the L2 of so many cores.
  const auto least = static_cast<int64_t>(6.3e6 / (2 * static_cast<double>(l2))) + 1;
  CHECK(threads("f32 b1 h12 q1 kv1024 d64") == least);
  CHECK(threads("bf16 b1 h12 q1 kv1024 d64") == least / 2);
  CHECK(threads("f32 b1 h1 q1 kv16 d64") == 1);
  CHECK(threads("f32 b1 h16 q384 kv384 d64") < 1000);
  CHECK(threads("f32 b1 h12 q64 kv1024 d64 bias") > threads("f32 b1 h12 q64 kv1024 d64"));
  for (const char* more : {" causal", " window=10,0", " window=-1,10"})
    CHECK(threads((std::string("f32 b1 h12 q8 kv1024 d64 align=br") + more).c_str()) == INT64_MAX);
  CHECK(threads("f32 b1 h20 q448 kv1500 d64") == INT64_MAX);  // arithmetic
  // Heads side by side, where rows are many; causal too, if workers have several heads each, which then come one by one.
  CHECK(threads("f32 b16 h12 q128 kv128 d64") > 2);
  CHECK(threads("f32 b16 h12 q128 kv128 d64 bshd") == 1);
  CHECK(threads("f32 b16 h12 q128 kv128 d64 causal bshd") == 1);
  CHECK(threads("f32 b1 h12 q1024 kv1500 d64 bshd") == INT64_MAX);
  CHECK(threads("f32 b16 h12 q384 kv384 d64 bshd") > 2);
  CHECK(threads("f32 b8 h32 q1 kv4096 d64 bshd") > 2);
  const plan causal = plan_of("f32 b2 h8 q96 kv96 d64 causal bshd");
  CHECK(schedule(causal, 4).in_shares());
  CHECK(!schedule(causal, 1).in_shares());
  CHECK(!schedule(causal, 5).in_shares());
  CHECK(!schedule(causal, 3).in_shares());  // 16 heads are not as many for each
  const schedule order(causal, 4);
  for (int64_t i = 1; i < order.tasks(); ++i) {
    const kernel_task before = order.at(i - 1), now = order.at(i);
    CHECK(before.batch * 8 + before.kv_head_begin <= now.batch * 8 + now.kv_head_begin);
  }
}

TEST_CASE("tasks that cost the same come head by head, others the longest of all heads first at the end") {
  for (const kernel_table* table : tables()) {
    CAPTURE(table->isa);
    const auto plan_for = [&](int64_t rows, const char* more) {
      const std::string q = std::to_string(rows);
      return make_plan(problem_of("f64 b1 h4 q" + q + " kv" + q + " d64" + more), *table, l2);  // one route for all
    };
    const auto by_heads = [](const plan& plan) {
      const schedule order(plan, 8);
      std::vector<int64_t> heads;
      for (int64_t i = 0; i < order.tasks(); ++i) heads.push_back(order.at(i).kv_head_begin);
      return std::ranges::is_sorted(heads) && heads.back() == 3;
    };
    const int64_t panel = plan_for(600, "").panel_rows;
    CHECK(by_heads(plan_for(16 * panel, "")));
    CHECK(!by_heads(plan_for(16 * panel, " causal")));
    for (const int64_t panels : {4, 16, 17, 20, 50})  // the last task of each head is short
      CHECK(!by_heads(plan_for(panels * panel + panel / 2, "")));
  }
}

// How often each item is taken when `workers` take in turn until nothing is left.
std::vector<int> taken_in_turn(int64_t items, int64_t workers, const dealing& how) {
  deal all(items, workers, how);
  std::vector<int> taken(static_cast<size_t>(items), 0);
  std::vector<bool> done(static_cast<size_t>(workers), false);
  for (int64_t left = workers; left > 0;) {
    for (int64_t w = 0; w < workers; ++w) {
      if (done[static_cast<size_t>(w)]) continue;
      deal::run run{};
      if (!all.take(w, run)) {
        done[static_cast<size_t>(w)] = true;
        --left;
        continue;
      }
      REQUIRE((run.begin < run.end && run.end <= items));
      for (int64_t i = run.begin; i < run.end; ++i) ++taken[static_cast<size_t>(i)];
    }
  }
  return taken;
}

TEST_CASE("each item is dealt once") {
  for (const int64_t items : {1, 2, 3, 7, 16, 63, 64, 65, 100, 1000}) {
    for (const int64_t workers : {2, 3, 16, 64, 65, 200}) {
      for (const int64_t step : {1, 3}) {
        for (const bool shares : {false, true}) {
          for (const bool in_halves : {false, true}) {
            INFO(items, " items, ", workers, " workers, step ", step, shares ? ", shares" : "",
                 in_halves ? ", halves" : "");
            const std::vector<int> taken = taken_in_turn(items, workers, {step, shares, in_halves});
            CHECK(std::ranges::all_of(taken, [](int times) { return times == 1; }));
          }
        }
      }
    }
  }
}

TEST_CASE("items dealt in order are taken in order, in halves fewer and fewer") {
  const auto runs = [](int64_t items, int64_t workers, const dealing& how, int64_t seat) {
    deal all(items, workers, how);
    std::vector<int64_t> ends;
    for (deal::run run{}; all.take(seat, run);) {
      CHECK(run.begin == (ends.empty() ? 0 : ends.back()));
      ends.push_back(run.end);
    }
    return ends;
  };
  CHECK(runs(5, 2, {2, false, false}, 1) == std::vector<int64_t>{2, 4, 5});
  CHECK(runs(16, 2, {1, false, true}, 0) == std::vector<int64_t>{4, 7, 9, 10, 11, 12, 13, 14, 15, 16});
  CHECK(runs(16, 1, {1, true, true}, 0) == std::vector<int64_t>{8, 12, 14, 15, 16});
}

TEST_CASE("a thread has the same share in every call, and then what is left of others'") {
  for (const int64_t items : {16, 17, 35, 1000}) {
    for (const int64_t seat : {0, 1, 3}) {
      deal all(items, 4, {1, true, false});
      std::vector<int64_t> order;
      for (deal::run run{}; all.take(seat, run);) order.push_back(run.begin);
      REQUIRE(static_cast<int64_t>(order.size()) == items);
      // Neighbours, from its quarter on, around.
      CHECK(order[0] == items * seat / 4);
      for (size_t i = 1; i < order.size(); ++i) CHECK(order[i] == (order[i - 1] + 1) % items);
    }
  }
  // What is left of a share that another has begun; one that nobody comes for is done by who is left.
  deal all(8, 4, {1, true, false});
  deal::run run{};
  CHECK((all.take(2, run) && run.begin == 4));
  CHECK((all.take(1, run) && run.begin == 2));
  CHECK((all.take(1, run) && run.begin == 3));
  CHECK((all.take(1, run) && run.begin == 5));
  CHECK((all.take(1, run) && run.begin == 6));
  CHECK((all.take(6, run) && run.begin == 7));  // threads beyond the shares have one as well
  CHECK((all.take(0, run) && run.begin == 0));
  CHECK((all.take(3, run) && run.begin == 1));
  CHECK(!all.take(0, run));
}

TEST_CASE("threads that take at once take each item once") {
  constexpr int64_t items = 20000;
  const auto check = [](int64_t workers, const dealing& how) {
    deal all(items, workers, how);
    std::vector<std::atomic<int>> taken(items);
    std::vector<std::thread> pool;
    for (int64_t w = 0; w < workers; ++w) {
      pool.emplace_back([&, w] {
        for (deal::run run{}; all.take(w, run);)
          for (int64_t i = run.begin; i < run.end; ++i) ++taken[static_cast<size_t>(i)];
      });
    }
    for (std::thread& thread : pool) thread.join();
    CHECK(std::ranges::all_of(taken, [](const std::atomic<int>& times) { return times == 1; }));
  };
  for (const int64_t workers : {3, 6, 70})
    for (const int64_t step : {1, 3})
      for (const bool shares : {false, true})
        for (const bool in_halves : {false, true}) check(workers, {step, shares, in_halves});
}

}  // namespace
}  // namespace manyhead::test
