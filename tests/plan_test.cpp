// What plans decide, without running them, and problems as lines of text.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "attended.hpp"
#include "blocks.hpp"
#include "core_test.hpp"
#include "error.hpp"
#include "json.hpp"
#include "machine.hpp"
#include "schedule.hpp"
#include "scheduler.hpp"

namespace manyhead::test {
namespace {

// --- lines of text ---------------------------------------------------------------------------------------------------

TEST_CASE("a line that is not understood is refused") {
  CHECK_THROWS_AS(parse_problem(""), std::exception);
  CHECK_THROWS_AS(parse_problem("f33 b1 h1 q1 kv1 d1"), std::exception);
  CHECK_THROWS_AS(parse_problem("f32 b1 h1 q1 d1"), std::exception);
  for (const char* word : {"casual", "v", "window=1", "window=1,x", "align=left", "align=off:", "scores=all",
                           "softcap=", "data=odd", "bias=f8", "d1x", "strides=", "bcast=x"}) {
    INFO(std::string(word));
    CHECK_THROWS_AS(parse_problem(std::string("f32 b1 h1 q1 kv1 d1 ") + word), std::exception);
  }
  const problem_line line = parse_problem(
      "bf16 b2 h8/2 q3 kv40 d16 v24 causal align=off:-5 window=7,-1 softcap=0.5 scale=-2e-3 bias=f16 lse2 bshd");
  const mh_problem& p = line.problem;
  CHECK(p.dtype == MH_DTYPE_BF16);
  CHECK((p.batch == 2 && p.heads == 8 && p.kv_heads == 2 && p.q_len == 3 && p.kv_len == 40 && p.head_dim == 16 &&
         p.v_dim == 24));
  CHECK(
      (p.causal == 1 && p.align == MH_ALIGN_OFFSET && p.q_offset == -5 && p.window_left == 7 && p.window_right == -1));
  CHECK((p.flags == (MH_FLAG_WINDOW | MH_FLAG_SCALE) && p.softcap == 0.5 && p.scale == -2e-3));
  CHECK((p.inputs == MH_INPUT_BIAS && p.bias_dtype == MH_DTYPE_F16 && p.outputs == MH_OUTPUT_LSE &&
         p.lse_base == MH_LSE_BASE2));
  CHECK((p.k_strides[0] == 40 * 2 * 16 && p.k_strides[1] == 16 && p.k_strides[2] == 2 * 16 && p.k_strides[3] == 1));
}

// Everything that the one-line syntax can say.
void check_same(const problem& a, const problem& b, bool strides) {
  CHECK(a.extra_keys == b.extra_keys);
  for (const auto field : {&mh_problem::batch, &mh_problem::heads, &mh_problem::kv_heads, &mh_problem::q_len,
                           &mh_problem::kv_len, &mh_problem::head_dim, &mh_problem::v_dim, &mh_problem::q_offset,
                           &mh_problem::window_left, &mh_problem::window_right})
    CHECK(a.*field == b.*field);
  for (const auto field : {&mh_problem::dtype, &mh_problem::causal, &mh_problem::align, &mh_problem::alibi_mode,
                           &mh_problem::lse_base, &mh_problem::scores_stage, &mh_problem::index_type})
    CHECK(a.*field == b.*field);
  for (const auto field : {&mh_problem::flags, &mh_problem::inputs, &mh_problem::outputs}) CHECK(a.*field == b.*field);
  if (a.has_input(MH_INPUT_BIAS)) CHECK(a.bias_dtype == b.bias_dtype);
  CHECK(a.scale == b.scale);
  CHECK(a.softcap == b.softcap);
  if (!strides) return;
  for (const auto field :
       {&mh_problem::q_strides, &mh_problem::k_strides, &mh_problem::v_strides, &mh_problem::out_strides})
    CHECK(std::memcmp(a.*field, b.*field, sizeof(a.*field)) == 0);
}

TEST_CASE("a plan's line is the problem it was made from") {
  for (const problem_line& line : read_problems(MH_PROBLEMS_FILE)) {
    const test_case c(line, false);
    const std::string text = describe(make_plan(c.p, current_isa(), l2), false);
    INFO(std::string(text));
    const problem_line again = parse_problem(text.substr(0, text.find(": ")));
    const test_case d(again, false);
    check_same(c.p, d.p, text.find(" strided") == text.npos);
    CHECK(text.find(std::string("@") + current_isa().isa) != text.npos);
  }
}

TEST_CASE("a plan's JSON is JSON") {
  for (const problem_line& line : read_problems(MH_PROBLEMS_FILE)) {
    const std::string text = describe(make_plan(test_case(line, false).p, current_isa(), l2), true);
    INFO(std::string(text));
    CHECK(is_json(text));
    for (const char* key :
         {"\"kernel\"", "\"isa\"", "\"block_q\"", "\"last_rows\"", "\"block_kv\"", "\"chunks\"", "\"tasks\"",
          "\"asks_in_order\"", "\"flops\"", "\"bytes\"", "\"tiles_skipped\"", "\"threads\"", "\"balance\""})
      CHECK(text.find(key) != text.npos);
  }
}

// --- decisions -------------------------------------------------------------------------------------------------------

TEST_CASE("a plan covers its problem") {
  for (const problem_line& line : read_problems(MH_PROBLEMS_FILE)) {
    const problem p = test_case(line, false).p;
    for (const kernel_table* table : tables()) {
      for (const int64_t cache : {int64_t{1} << 14, l2, int64_t{1} << 24}) {
        const plan a = make_plan(p, *table, cache);
        CAPTURE(line.text);
        CHECK(describe(a, true) == describe(make_plan(p, *table, cache), true));  // same input, same plan
        const int64_t rows = p.rows();
        CHECK((a.block_q >= 1 && a.block_kv >= 1 && a.chunks >= 1));
        const int64_t whole = rows - a.last_rows;
        CHECK((a.last_rows >= 0 && (a.last_rows == 0 || whole > 0) && a.last_rows <= most_decode_rows));
        CHECK((a.row_blocks * a.block_q >= whole && (a.row_blocks - 1) * a.block_q < std::max<int64_t>(whole, 1)));
        CHECK(a.chunk_keys % a.block_kv == 0);
        CHECK(a.chunks * a.chunk_keys >= std::min(p.kv_len, most_keys_between(p) + a.block_kv - 1));
        CHECK((a.chunks - 1) * a.chunk_keys < std::max<int64_t>(p.kv_len, 1));
        CHECK(a.tasks == p.batch * p.kv_heads * a.row_blocks * a.chunks);
        CHECK((a.tiles_skipped >= 0 && a.tiles_skipped <= 1));
        constexpr uint32_t of_weights = MH_OUTPUT_WEIGHTS | MH_OUTPUT_MEAN_WEIGHTS | MH_OUTPUT_COLUMN_SUMS;
        CHECK((a.keeps != keeping::nothing) == ((p.outputs & of_weights) != 0));
      }
    }
  }
}

TEST_CASE("scores are kept in bounded memory, and tasks of means take whole queries") {
  constexpr int64_t most_bytes = 4 << 20;
  for (const kernel_table* table : tables()) {
    for (const char* dtype : {"f32", "bf16", "f64"}) {
      for (const char* shape : {" b1 h8 q500 kv500 d64", " b1 h32/8 q300 kv2000 d64", " b1 h6/2 q300 kv9000 d64",
                                " b1 h7/1 q200 kv30000 d8", " b2 h64 q40 kv500 d16", " b1 h8 q1000 kv20000 d64",
                                " b100 h16/8 q3 kv500 d64", " b9 h71/1 q40 kv300 d16", " b8 h32 q128 kv8192 d64",
                                " b1 h32/4 q1000 kv40000 d64", " b1 h5/1 q4000 kv200 d128"}) {
        for (const char* outputs : {" weights", " meanw", " colsums", " meanw colsums"}) {
          const problem p = problem_of(dtype + std::string(shape) + outputs);
          const plan a = make_plan(p, *table, l2);
          CAPTURE(describe(a, false));
          const int64_t real = p.is_f64() ? 8 : 4, row_bytes = a.call.kept_pitch * real;
          CHECK(a.block_q <= (a.kernel == route_matrix ? 32 : 16) * a.panel_rows);
          // Of split keys of few rows, beside more numbers of K and V.
          CHECK((a.keeps == keeping::of_task || a.kept_bytes <= 4 * l2 || (a.chunks > 1 && a.call.rows <= 16)));
          CHECK(a.column_bytes <= 64 + p.batch * p.heads * p.kv_len * real * (1 + a.call.rows / (4 * a.panel_rows)));
          if (a.keeps != keeping::of_task) continue;
          CHECK(a.scratch_bytes == a.kept_at + a.kept_rows * row_bytes);
          CHECK(a.kept_rows - a.last_rows <= a.block_q);
          const int64_t least = a.kernel == route_decode   ? a.block_q
                                : a.kernel == route_matrix ? a.panel_rows
                                                           : a.lanes();
          CHECK((a.kept_rows - a.last_rows) * row_bytes <= std::max(most_bytes, least * row_bytes));
          CHECK((!means(p) || a.weighed_rows % p.group() == 0));
          CHECK((a.weighed_blocks - 1) * a.weighed_rows < a.call.rows - a.last_rows);
        }
      }
    }
  }
}

TEST_CASE("masks that heads share are looked at once where that pays, in bounded memory") {
  // Bytes of openings of such a problem whose mask and bias are shared along the dimensions named.
  const auto bytes = [](const kernel_table& table, const std::string& text, const std::string& shared) {
    problem p = problem_of(text);
    for (const char dim : shared) {
      const size_t i = std::string("bhqk").find(dim);
      p.mask_strides[i] = p.bias_strides[i] = 0;
    }
    const plan a = make_plan(p, table, l2);
    CHECK(a.shared_bytes >= a.openings_bytes);
    return a.openings_bytes;
  };
  for (const kernel_table* table : tables()) {
    for (const char* dtype : {"f32", "bf16", "f64"}) {
      const auto of = [&](const std::string& text, const char* shared) { return bytes(*table, dtype + text, shared); };
      constexpr int64_t words = 4 + 1, block = sizeof(opening);  // of a row of 128 keys
      CHECK(of(" b2 h8 q128 kv128 d64 mask", "") == 0);
      CHECK(of(" b2 h8 q128 kv128 d64 mask", "b") == 0);
      CHECK(of(" b2 h8 q128 kv128 d64 mask", "h") == 2 * (128 * words * 4 + 16 * block));
      CHECK(of(" b2 h8 q128 kv128 d64 mask", "bh") == 128 * words * 4 + 16 * block);
      CHECK(of(" b2 h8 q128 kv128 d64 mask", "hq") == round_up(2 * (words * 4 + block), 64));
      CHECK(of(" b2 h8 q128 kv128 d64 keymask", "") == round_up(2 * (words * 4 + block), 64));
      CHECK(of(" b2 h8 q128 kv128 d64 mask bias keymask", "hq") == 3 * round_up(2 * (words * 4 + block), 64));
      CHECK(of(" b2 h4 q128 kv128 d64 mask", "h") == 0);  // too few keys for each row
      CHECK(of(" b2 h4 q128 kv128 d64 bias", "h") > 0);
      CHECK(of(" b2 h2 q64 kv64 d64 bias", "h") == 0);
      CHECK(of(" b2 h12 q128 kv32 d64 bias", "h") == 0);
      CHECK(of(" b2 h8 q1 kv4096 d64 bias", "hq") == 0);                  // a step
      CHECK(of(" b1 h4/1 q300000 kv300000 d16 bias", "bhqk") < 1 << 20);  // strides alone
      CHECK(of(" b1 h4/1 q300000 kv300000 d16 bias", "bh") == 0);
    }
  }
}

TEST_CASE("plans of any lengths tell sizes that no machine has, not negative ones") {
  for (const kernel_table* table : tables()) {
    for (const char* text :
         {"f64 b0 h3/1 q1 kv102000000000000000 d1 weights meanw colsums",
          "f16 b1 h71/1 q3 kv1020000000000000 d1 weights meanw",
          "bf16 b1 h17/1 q3 kv9000000000000000 d1 weights colsums",
          "bf16 b1 h1024/1 q200 kv1100000000000 d1 weights colsums", "f32 b3 h2048/1 q113 kv137000000000 d1 colsums",
          "f32 b1 h19319075468/1 q4194304 kv0 d8 weights meanw", "f32 b2 h96186043474/1 q16 kv1 d64 meanw"}) {
      INFO(std::string(text));
      const plan a = make_plan(problem_of(text), *table, l2);
      CHECK((a.scratch_bytes >= 0 && a.shared_bytes >= 0 && workspace_bytes(a, 1024) >= 0));
    }
  }
}

TEST_CASE("borders along the keys are the same for every shape and cache") {
  for (const kernel_table* table : tables()) {
    for (const char* dtype : {"f32", "f64", "bf16", "f16"}) {
      for (const char* dims : {" d16", " d64", " d128", " d160 v128", " d576 v512"}) {
        // Of each route, with up to 2 rows and more, and on the unit.
        std::map<std::tuple<int32_t, bool, bool>, int64_t> tile_keys, chunk_keys;
        for (const char* shape :
             {" b1 h1 q1 kv10000", " b1 h1 q64 kv10000", " b7 h8/2 q3 kv9000", " b1 h1 q1 kv40", " b2 h4 q300 kv500",
              " b1 h4/1 q30 kv70000", " b2 h2/1 q1 kv700", " b2 h2 q2 kv7000"}) {
          for (const int64_t cache : {int64_t{1} << 15, l2, int64_t{1} << 25}) {
            const plan other = make_plan(problem_of(dtype + std::string(shape) + dims), *table, cache);
            CAPTURE(describe(other, false));
            const std::tuple<int32_t, bool, bool> kind{other.kernel, other.call.rows <= 2, other.unit_steps};
            CHECK(tile_keys.emplace(kind, other.block_kv).first->second == other.block_kv);
            if (other.kernel == route_matrix) CHECK(other.block_kv == 128);
            if (other.chunks > 1) CHECK(chunk_keys.emplace(kind, other.chunk_keys).first->second == other.chunk_keys);
          }
        }
      }
    }
  }
}

TEST_CASE("one row and two decode with larger tiles, as far as a tile of K goes into cache") {
  struct {
    const char* line;
    int64_t keys;
  } const tiles[] = {
      {"f32 b2 h8 q1 kv40 d64", 256},    {"f32 b1 h8 q2 kv4000 d128", 256},  {"f32 b1 h8/4 q1 kv4000 d256", 256},
      {"f32 b1 h8 q1 kv4000 d257", 128}, {"f32 b1 h8 q1 kv4000 d576", 64},   {"f32 b1 h8 q1 kv4000 d64 v512", 128},
      {"f64 b1 h8 q1 kv4000 d128", 256}, {"f64 b1 h8 q1 kv4000 d136", 128},  {"bf16 b1 h8 q1 kv4000 d32", 256},
      {"bf16 b1 h8 q1 kv4000 d64", 128}, {"f16 b1 h8 q2 kv4000 d64", 128},   {"f16 b1 h8 q1 kv4000 d128", 64},
      {"f32 b1 h8 q3 kv4000 d64", 64},   {"f32 b1 h12/4 q1 kv4000 d64", 64}, {"f32 b1 h8/4 q2 kv4000 d64", 64},
  };
  for (const auto& x : tiles) {
    const plan plan = plan_of(x.line);
    const int64_t keys = plan.unit_steps ? std::min<int64_t>(4 * x.keys, 256) : x.keys;
    if (plan.kernel == route_decode) CHECK_MESSAGE(plan.block_kv == keys, x.line << ": " << plan.block_kv);
  }
  // By pairs a tile of K may have four times the bytes, and is asked for into L2, but by Zen 5 from memory.
  for (const kernel_table* table : tables()) {
    const bool by_pairs = table->dtype[MH_DTYPE_BF16].unit_steps == steps_of_pairs;
    for (const cpu_core core : {cpu_core::zen4, cpu_core::zen5, cpu_core::other}) {
      const auto plan_for = [&](const char* line) { return make_plan(problem_of(line), *table, l2, core); };
      const plan one = plan_for("bf16 b1 h8 q1 kv4000 d128"), two = plan_for("bf16 b1 h8 q2 kv4000 d256");
      CHECK((one.block_kv == (by_pairs ? 256 : 64) && two.block_kv == (by_pairs ? 128 : 64)));
      CHECK(one.asks_l1 == (core == cpu_core::zen5 || (core != cpu_core::zen4 && !by_pairs)));
      const plan from_l3 = make_plan(one.p, *table, l2, core, int64_t{1} << 30);
      CHECK(from_l3.asks_l1 == (core != cpu_core::zen4 && !by_pairs));
      CHECK(plan_for("bf16 b1 h8 q3 kv4000 d128").asks_l1 == (core != cpu_core::zen4));
      CHECK(plan_for("f16 b1 h8 q1 kv4000 d128").block_kv == 64);
    }
  }
}

TEST_CASE("short queries against long keys are split") {
  CHECK(plan_of("f32 b1 h32/1 q1 kv16384 d128").chunks > 16);
  CHECK(plan_of("f32 b1 h1 q8 kv4096 d64").chunks > 4);
  CHECK(plan_of("f32 b1 h1 q1 kv100 d64").chunks == 1);
  CHECK(plan_of("f32 b1 h8 q1024 kv2048 d64").chunks == 1);
  // Of a window, as many as it needs wherever it lies; where it has no end, or extra keys follow, those of all keys.
  CHECK(plan_of("f32 b1 h8 q1 kv131072 d64 window=127,0 align=br").chunks == 1);
  CHECK(plan_of("f32 b1 h8 q1 kv131072 d64 causal window=127,-1 align=br").chunks == 1);
  CHECK(plan_of("f32 b1 h8 q1 kv131072 d64 window=127,0 align=br").bytes == plan_of("f32 b1 h8 q1 kv128 d64").bytes);
  CHECK(plan_of("f32 b1 h8 q2 kv131072 d64 window=2000,500 offsets").chunks == 6);
  CHECK(plan_of("f32 b1 h8 q1 kv131072 d64 window=127,-1 align=br").chunks == 256);
  CHECK(plan_of("f32 b1 h8 q1 kv131072 d64 window=127,0 extra=1 align=br").chunks == 256);
  CHECK(plan_of("f32 b1 h8 q1 kv100 d64").kernel == route_decode);
  CHECK(plan_of("f32 b1 h8 q1000 kv100 d64").kernel != route_decode);
}

TEST_CASE("few rows decode, more of them the larger the head") {
  // The most rows of a head that decode, with vectors of 16 and of 8 floats: one vector of rows, and what the second allows,
  // of 16 in 16 bits alone.
  struct limit {
    int64_t dim, one[2], two[2];
  };
  const int64_t lanes = current_isa().lanes;
  if (lanes < 8) return;
  const auto plan_for = [](const std::string& dtype, int64_t rows, int64_t dim, int64_t keys) {
    const std::string q = " q" + std::to_string(rows), kv = " kv" + std::to_string(keys),
                      d = " d" + std::to_string(dim);
    return plan_of(dtype + " b1 h8" + q + kv + d);
  };
  const auto decodes = [&](const std::string& dtype, int64_t rows, int64_t dim, int64_t keys = 24) {
    return plan_for(dtype, rows, dim, keys).kernel == route_decode;
  };
  for (const limit& x : {limit{16, {5, 4}, {0, 0}}, limit{32, {8, 6}, {0, 9}}, limit{64, {12, 7}, {18, 11}},
                         limit{128, {14, 8}, {23, 13}}, limit{256, {16, 8}, {26, 13}}, limit{512, {16, 8}, {27, 14}}}) {
    const int narrow = lanes == 8 ? 1 : 0;
    for (int64_t rows = 1; rows <= 2 * lanes; ++rows) {
      const int64_t most = rows <= lanes ? x.one[narrow] : x.two[narrow];
      for (const char* dtype : {"f32", "bf16", "f16"}) {
        const bool one_vector = lanes == 16 && dtype == std::string("f32");
        const int64_t keys = dtype == std::string("f32") ? 40 : 24;  // in 16 bits a matrix unit takes more
        if (plan_for(dtype, rows, x.dim, keys).unit_steps) continue;
        CHECK_MESSAGE(decodes(dtype, rows, x.dim, keys) == (rows <= (one_vector ? std::min(most, lanes) : most)),
                      std::string(dtype) << ", " << rows << " rows, head_dim " << x.dim);
      }
    }
  }
  // With few keys more of them, in f32: heads of 64.
  struct few {
    int64_t keys, wide, narrow;
  };
  for (const few& x : {few{16, 14, 15}, few{17, 12, 13}, few{32, 12, 13}, few{33, 12, 11}}) {
    for (int64_t rows = 9; rows <= 16; ++rows) {
      CHECK_MESSAGE(decodes("f32", rows, 64, x.keys) == (rows <= (lanes == 8 ? x.narrow : x.wide)),
                    rows << " rows, " << x.keys << " keys");
      const plan of_16_bits = plan_for("bf16", rows, 64, x.keys);
      if (of_16_bits.kernel != route_matrix && !of_16_bits.unit_steps)
        CHECK(decodes("bf16", rows, 64, x.keys) == decodes("bf16", rows, 64));
    }
  }
}

TEST_CASE("on Zen 5 more rows decode: in 16 bits with AVX-512 alone, and the last of many") {
  if (current_isa().lanes < 16) return;
  const auto plan_on = [](const char* line, cpu_core core) {
    return make_plan(problem_of(line), current_isa(), l2, core);
  };
  for (const char* line : {"f16 b1 h8 q13 kv24 d64", "f16 b1 h8 q16 kv24 d128", "f16 b1 h8 q26 kv24 d128"}) {
    if (plan_on(line, cpu_core::other).unit_steps || plan_on(line, cpu_core::other).kernel == route_matrix) continue;
    CHECK(plan_on(line, cpu_core::zen5).kernel == route_decode);
    CHECK(plan_on(line, cpu_core::other).kernel == route_tile);
  }
  CHECK(plan_on("f32 b1 h8 q16 kv40 d128", cpu_core::zen5).kernel == route_tile);
  const auto last_rows = [&](const char* line, cpu_core core) { return plan_on(line, core).last_rows; };
  if (plan_on("f32 b1 h8 q24 kv40 d128", cpu_core::other).kernel != route_tile) return;
  CHECK(last_rows("f32 b1 h8 q24 kv40 d128", cpu_core::zen4) == 8);
  CHECK(last_rows("f32 b1 h8 q24 kv40 d128", cpu_core::zen5) == 8);
  CHECK(last_rows("f32 b1 h8 q24 kv40 d128", cpu_core::other) == 0);
  CHECK(last_rows("f32 b1 h8 q25 kv40 d256", cpu_core::zen4) == 9);
  CHECK(last_rows("f32 b1 h8 q25 kv40 d256", cpu_core::zen5) == 0);
}

TEST_CASE("few rows go by pairs, on Zen 5 fewer of them") {
  const auto plan_on = [](const std::string& line, cpu_core core) {
    return make_plan(problem_of(line), current_isa(), l2, core);
  };
  if (!plan_on("bf16 b1 h8 q1 kv64 d64", cpu_core::other).unit_steps) return;
  const auto route = [&](const char* rows, cpu_core core, const char* dim = "64") {
    return plan_on(std::string("bf16 b1 h8 q") + rows + " kv64 d" + dim, core).kernel;
  };
  CHECK((route("25", cpu_core::zen5) == route_decode && route("26", cpu_core::zen5) == route_matrix));
  CHECK((route("28", cpu_core::zen4) == route_decode && route("29", cpu_core::zen4) == route_matrix));
  CHECK((route("28", cpu_core::zen5, "128") == route_decode && route("29", cpu_core::zen5, "128") == route_matrix));
  for (const cpu_core core : {cpu_core::zen4, cpu_core::zen5})
    CHECK((route("20", core, "80") == route_decode && route("21", core, "80") == route_matrix));
  // Behind a panel of 32.
  const auto last = [&](int64_t rows, cpu_core core, const char* dim) {
    return plan_on("bf16 b1 h8 q" + std::to_string(32 + rows) + " kv64 d" + dim, core).last_rows;
  };
  struct limit {
    const char* dim;
    int64_t zen4, zen5;
  };
  for (const limit& x : {limit{"64", 24, 11}, limit{"80", 17, 11}, limit{"128", 24, 13}}) {
    CHECK((last(x.zen4, cpu_core::zen4, x.dim) == x.zen4 && last(x.zen4 + 1, cpu_core::zen4, x.dim) == 0));
    CHECK((last(x.zen5, cpu_core::zen5, x.dim) == x.zen5 && last(x.zen5 + 1, cpu_core::zen5, x.dim) == 0));
  }
  // Of large heads those that would not nearly fill a whole panel, either.
  CHECK((last(17, cpu_core::zen5, "128") == 17 && last(23, cpu_core::zen5, "128") == 23));
  CHECK((last(16, cpu_core::zen5, "128") == 0 && last(24, cpu_core::zen5, "128") == 0));
}

TEST_CASE("K and V are copied only where kernels cannot read them in place, or only with L1 misses") {
  for (const char* line :
       {"f32 b1 h2 q100 kv100 d64", "f32 b1 h2 q100 kv100 d64 bshd", "f64 b1 h2 q100 kv100 d24 strides=packed",
        "f32 b1 h2 q100 kv100 d33 strides=odd", "f32 b1 h2 q100 kv100 d64 strides=negative", "f32 b1 h1 q1 kv100 d64",
        "f16 b1 h2 q1 kv100 d64", "f32 b1 h6 q500 kv500 d64 bshd", "f32 b1 h4 q100 kv500 d64 bshd",
        "f32 b1 h4 q500 kv500 d64", "f32 b1 h1 q500 kv500 d256 bshd", "f32 b1 h4 q1 kv500 d64 bshd",
        "f16 b1 h2 q1 kv100 d40", "f32 b1 h2 q1 kv100 d33"})
    CHECK_MESSAGE(!plan_of(line).copy_kv, line);
  for (const char* line :
       {"bf16 b1 h2 q100 kv100 d64", "f16 b1 h2 q1 kv100 d1", "f32 b1 h2 q1 kv100 d64 v1",
        "f32 b1 h2 q100 kv100 d64 strides=lastdim", "f32 b1 h2 q100 kv100 d64 strides=transposed",
        "f64 b1 h2 q100 kv100 d64 strides=reversed", "f32 b1 h2 q100 kv100 d64 strides=zero",
        "f32 b1 h4 q500 kv500 d64 bshd", "f64 b1 h2 q500 kv500 d64 bshd", "f32 b1 h12 q500 kv500 d64 bshd causal"})
    CHECK_MESSAGE(plan_of(line).copy_kv, line);
}

TEST_CASE(
    "memory is asked for ahead where K and V are not in cache, far from it where there is nothing to hide it behind") {
  for (const char* line : {"f32 b1 h4/1 q1 kv2048 d128", "bf16 b8 h4/2 q2 kv1024 d128", "f16 b1 h4 q1 kv8192 d128",
                           "f32 b8 h12 q128 kv128 d64", "f32 b1 h4 q1 kv8192 d128", "f64 b1 h4 q1 kv8192 d128"})
    CHECK_MESSAGE(plan_of(line).prefetch, line);
  for (const char* line :
       {"f32 b1 h4/1 q1 kv512 d128", "f32 b1 h12 q1 kv512 d64", "f64 b1 h6 q1 kv512 d64", "f32 b1 h2 q512 kv512 d64"})
    CHECK_MESSAGE(!plan_of(line).prefetch, line);
}

TEST_CASE("cores that bring rows better when asked otherwise are") {
  using enum cpu_core;
  const auto asks_own = [](const char* line, cpu_core core) {
    return make_plan(problem_of(line), current_isa(), l2, core).asks_own;
  };
  CHECK(asks_own("f32 b2 h4/1 q1 kv2048 d128", zen5));
  CHECK(!asks_own("f32 b2 h4/1 q1 kv2048 d128", zen4));
  CHECK(!asks_own("f32 b2 h4/1 q1 kv2048 d128", other));
  CHECK(asks_own("f32 b2 h4/2 q1 kv2048 d128 bshd", zen5));
  CHECK(!asks_own("f32 b2 h4/2 q1 kv2048 d128 bshd", intel));          // rows of other heads lie between
  CHECK(asks_own("f32 b2 h4/2 q1 kv2048 d128 strides=packed", zen5));  // gaps between rows of all heads
  CHECK(!asks_own("f32 b2 h4/2 q1 kv2048 d128 strides=packed", intel));
  const auto in_order = [](const char* line, cpu_core core) {
    return make_plan(problem_of(line), current_isa(), l2, core).asks_in_order;
  };
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    CHECK(in_order((dtype + std::string(" b2 h4/1 q1 kv2048 d128")).c_str(), zen5));
    // More rows than a pass takes would ask for a line twice; by pairs it takes eight.
    const std::string five = dtype + std::string(" b2 h5/1 q1 kv2048 d128");
    CHECK(in_order(five.c_str(), zen5) == make_plan(problem_of(five.c_str()), current_isa(), l2, zen5).unit_steps);
    CHECK(!in_order((dtype + std::string(" b2 h9/1 q1 kv2048 d128")).c_str(), zen5));
    CHECK(in_order((dtype + std::string(" b2 h10/2 q1 kv2048 d128 bshd")).c_str(), zen5));
    CHECK(in_order((dtype + std::string(" b2 h4/2 q1 kv2048 d128 strides=packed")).c_str(), zen5));
    // With gaps, long rows of 32 bits are not.
    CHECK(in_order((dtype + std::string(" b2 h16 q1 kv2048 d64 strides=packed")).c_str(), zen5));
    CHECK(in_order((dtype + std::string(" b2 h17 q1 kv2048 d64 strides=packed")).c_str(), zen5) ==
          (std::string(dtype) != "f32"));
    CHECK(!in_order((dtype + std::string(" b2 h4/2 q1 kv2048 d128 strides=odd")).c_str(), zen5));
    for (const cpu_core core : {zen4, intel, other}) {
      CHECK(!in_order((dtype + std::string(" b2 h4/1 q1 kv2048 d128")).c_str(), core));
      CHECK(!in_order((dtype + std::string(" b2 h4/2 q1 kv2048 d128 bshd")).c_str(), core));
    }
  }
  for (const kernel_table* table : tables()) {
    const bool by_pairs = table->dtype[MH_DTYPE_BF16].unit_steps == steps_of_pairs;
    const auto whole_v_rows = [&](const char* line, cpu_core core, int64_t l3) {
      return make_plan(problem_of(line), *table, l2, core, l3).whole_v_rows;
    };
    CHECK(whole_v_rows("bf16 b2 h4/1 q1 kv2048 d128", zen5, l2) == by_pairs);
    CHECK(!whole_v_rows("bf16 b2 h4/1 q1 kv2048 d128", zen5, 64 * l2));
    CHECK(!whole_v_rows("bf16 b2 h5/1 q1 kv2048 d128", zen5, l2));
    CHECK(!whole_v_rows("bf16 b2 h4/1 q1 kv2048 d128", zen4, l2));
    CHECK(whole_v_rows("f32 b2 h4/1 q1 kv2048 d128", zen5, l2));
    CHECK(!whole_v_rows("f32 b2 h4/1 q1 kv2048 d128", zen4, l2));
  }
  // Intel: in a third of L3 alone, and not for passes of four long rows.
  constexpr int64_t mb = 1 << 20;
  const auto on_intel = [](const char* line, int64_t l3) {
    return make_plan(problem_of(line), current_isa(), l2, intel, l3);
  };
  CHECK(on_intel("f32 b1 h12 q4 kv1024 d64", 19 * mb).asks_own);  // 6 MB
  CHECK(!on_intel("f32 b1 h12 q4 kv1024 d64", 17 * mb).asks_own);
  CHECK(on_intel("f32 b1 h6 q2 kv1024 d128", 19 * mb).asks_own);
  for (const char* rows : {"3", "4"})
    CHECK(!on_intel(("f32 b1 h6 q" + std::string(rows) + " kv1024 d128").c_str(), 19 * mb).asks_own);
  CHECK(!on_intel("f32 b1 h8 q3 kv400 d64", 1000 * mb).prefetch);  // 1.6 MB, twice L2 is 2
  CHECK(on_intel("f32 b1 h8 q4 kv400 d64", 1000 * mb).prefetch);
  CHECK(on_intel("bf16 b1 h8 q2 kv800 d64", 1000 * mb).prefetch);
  const bool wide = current_isa().lanes >= 16;
  CHECK(on_intel("f32 b1 h16 q3 kv400 d64", 1000 * mb).prefetch == wide);  // 3.2 MB
  for (const char* line : {"f32 b1 h16 q3 kv400 d64", "f16 b1 h16 q3 kv800 d64", "f64 b1 h16 q7 kv400 d64"})
    CHECK(on_intel(line, 1000 * mb).adds_rows == wide);
  CHECK(!on_intel("f32 b1 h1 q3 kv400 d64", 1000 * mb).adds_rows);
  CHECK(!on_intel("f32 b1 h16 q99 kv500 d64", 1000 * mb).adds_rows);  // the last three find K and V in cache
  CHECK(make_plan(problem_of("f32 b1 h16 q3 kv400 d64"), current_isa(), l2, zen5).adds_rows == wide);
  CHECK(!make_plan(problem_of("f16 b1 h16 q3 kv800 d64"), current_isa(), l2, zen5).adds_rows);
  CHECK(!make_plan(problem_of("f32 b1 h16 q3 kv400 d64"), current_isa(), l2, zen4).adds_rows);
  const problem bf16 = problem_of("bf16 b2 h4/1 q1 kv2048 d128");
  CHECK(make_plan(bf16, current_isa(), l2, other).asks_l1);
  CHECK(make_plan(bf16, current_isa(), l2, zen5).asks_l1);
  CHECK(!make_plan(bf16, current_isa(), l2, zen4).asks_l1);
}

TEST_CASE("cores that bring what lies in half of L3 are not asked to") {
  using enum cpu_core;
  const int64_t l3 = 32 * l2;
  const auto asks = [](const char* line, cpu_core core, int64_t l3_bytes, const kernel_table& table = current_isa()) {
    return make_plan(problem_of(line), table, l2, core, l3_bytes).prefetch;
  };
  CHECK(asks("f32 b1 h8 q2 kv2047 d128", other, l3));
  CHECK(asks("f32 b1 h8 q2 kv2047 d128", zen5, 0));
  CHECK(!asks("f32 b1 h8 q2 kv2047 d128", zen5, l3));
  CHECK(asks("f32 b1 h8 q2 kv2048 d128", zen5, l3));
  CHECK(asks("bf16 b1 h8 q2 kv2047 d128", zen5, l3));
  CHECK(asks("f32 b1 h8 q64 kv400 d128", zen5, l3));
  CHECK(!asks("f32 b1 h8 q2 kv2047 d128 bshd", intel, l3));
  CHECK(asks("f32 b1 h8 q2 kv2047 d128 bshd", other, l3));
  CHECK(asks("f32 b1 h8 q2 kv2047 d128 bshd", intel, 0));
  CHECK(asks("f32 b1 h8 q2 kv2048 d128 bshd", intel, l3));
  CHECK(asks("f32 b1 h8 q3 kv2047 d128 bshd", intel, l3));
  CHECK(asks("f32 b1 h8 q2 kv2047 d128", intel, l3));        // rows one behind the other
  CHECK(!asks("f32 b1 h9 q2 kv1800 d128 bshd", intel, l3));  // 4608 bytes apart
  CHECK(asks("bf16 b1 h16 q2 kv2047 d128 bshd", intel, l3));
  for (const kernel_table* table : tables()) {
    const bool wide = table->lanes >= 16;
    CAPTURE(table->isa);
    CHECK(!asks("f32 b1 h8 q1 kv2047 d128", zen4, l3, *table));
    CHECK(asks("f32 b1 h8 q3 kv2047 d128", zen4, l3, *table) == !wide);
    CHECK(asks("f32 b1 h8 q4 kv2047 d128", zen4, l3, *table));
    CHECK(asks("bf16 b1 h8 q4 kv2047 d128", zen4, l3, *table) == !wide);
    CHECK(!asks("bf16 b1 h8 q1 kv4095 d128", zen4, l3, *table));
    CHECK(asks("bf16 b1 h8 q1 kv4096 d128", zen4, l3, *table));
  }
}

TEST_CASE("skipped tiles and attended pairs are counted right") {
  const mh_tensors none{};
  for (const char* text :
       {"f32 b1 h1 q700 kv700 d64", "f32 b1 h1 q700 kv700 d64 causal", "f32 b2 h4/2 q300 kv900 d64 causal align=br",
        "f32 b2 h4/2 q300 kv900 d64 causal align=tl", "f32 b1 h2 q900 kv300 d64 causal align=br",
        "f32 b1 h1 q800 kv800 d64 window=50,10", "f32 b1 h3/1 q500 kv800 d64 window=70,-1 align=off:-100",
        "f32 b1 h1 q500 kv800 d64 causal align=off:5000", "f32 b1 h1 q500 kv800 d64 causal align=off:-5000",
        "f32 b1 h1 q400 kv402 d64 extra=2 causal align=tl", "f64 b1 h1 q300 kv300 d8 causal window=99,0"}) {
    const plan plan = plan_of(text);
    const problem& p = plan.p;
    CAPTURE(describe(plan, false));
    double pairs = 0, used = 0;
    const int64_t tiles = (p.kv_len + plan.block_kv - 1) / plan.block_kv, rows = p.rows();
    const int64_t panel = std::min(plan.block_q, plan.panel_rows);
    int64_t panels = 0;
    for (int64_t begin = 0; begin < rows; begin += panel, ++panels) {
      std::vector<bool> needed(static_cast<size_t>(tiles));
      for (int64_t row = begin; row < std::min(begin + panel, rows); ++row)
        for (int64_t j = 0; j < p.kv_len; ++j) {
          if (!attends(p, none, 0, row % p.group(), row / p.group(), j)) continue;
          ++pairs;
          needed[static_cast<size_t>(j / plan.block_kv)] = true;
        }
      used += static_cast<double>(std::count(needed.begin(), needed.end(), true));
    }
    pairs *= static_cast<double>(p.batch * p.kv_heads);  // of one kv head, with all its query heads
    CHECK(plan.flops == doctest::Approx(2 * static_cast<double>(p.head_dim + p.v_dim) * pairs));
    // Extra keys lie behind the others, and a panel goes through all tiles between its first and its last.
    if (p.extra_keys == 0) CHECK(plan.tiles_skipped == doctest::Approx(1 - used / static_cast<double>(tiles * panels)));
  }
  const double causal = plan_of("f32 b1 h1 q4096 kv4096 d64 causal").tiles_skipped;
  CHECK((causal > 0.45 && causal < 0.5));
  CHECK(plan_of("f32 b1 h1 q4096 kv4096 d64 window=100,0").tiles_skipped > 0.9);
}

}  // namespace
}  // namespace manyhead::test
