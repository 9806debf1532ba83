// Every kernel of one instruction set against the reference, on every line of problems.txt, and properties that need no
// reference.
//
//   kernel_test [--isa=<name>] [--line=<part of a line>] [--brief] [--verbose] [doctest's options]
//
// The ISA can also come from MH_TEST_ISA; without either all that this CPU can run are tested. Asking for one that the
// CPU lacks ends with 77, which Meson counts as skipped. --brief leaves out, where there is no matrix unit, lines that are
// there for one: half of the work. --verbose prints the largest errors of each line.
//
// f32 lines that are quick are run in the other dtypes too. Each is run twice, with large and with small task sizes:
// the bits must not change. Tolerances, against values computed from the exact inputs:
//   f32  5e-6 + 5e-6 |x| (the lse 5e-6 + 1e-6 |x|), f64 1e-12 + 1e-12 |x|
//   more where scores are so large that rounding a dot product moves them: 4u * scale * |q||k| * max|v|, u half a unit
//   of 1 bf16 and f16 compute in f32, so they get one rounding to their own precision on top, and no more; but where a
//   matrix unit multiplies bf16, another one of the weights.
#include <doctest/doctest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "exec_of.hpp"
#include "machine.hpp"
#include "plan.hpp"
#include "projection.hpp"
#include "registry.hpp"
#include "schedule.hpp"
#include "scheduler.hpp"
#include "test_case.hpp"

#define MH_ISA_ROW(name, ...)             \
  namespace manyhead::name {              \
  const kernel_table* kernels() noexcept; \
  }
#include "kernels/isa_list_emulated.inc"
#undef MH_ISA_ROW

namespace manyhead::test {
namespace {

struct isa_row {
  std::string name;
  kernel_table table;
  bool runs;
};
isa_row in_library(const char* name) {
  for (int32_t i = 0; i < isa_count(); ++i)
    if (std::string(isa_table(i)->isa) == name) return {name, *isa_table(i), isa_supported(i)};
  kernel_table none{};
  none.isa = "none in the library";
  return {name, none, true};
}
// The library's, and the emulated ones, which any CPU runs.
const std::vector<isa_row> isa_rows = {
#define MH_ISA_ROW(name, ...) in_library(#name),
#include "kernels/isa_list.inc"
#undef MH_ISA_ROW
#define MH_ISA_ROW(name, ...) {#name, *manyhead::name::kernels(), true},
#include "kernels/isa_list_emulated.inc"
#undef MH_ISA_ROW
};

struct {
  std::vector<const kernel_table*> tables;  // those to test
  std::string line;
  bool brief = false, verbose = false;
} chosen;

constexpr const char* dtype_names[] = {"f32", "f64", "bf16", "f16"};
constexpr int64_t large_l2 = 1 << 20, small_l2 = 1 << 14, large_l3 = 1 << 30;
constexpr double quick = 1.5e6;  // multiply-adds up to which a line is run in all dtypes

void run(test_case& c, const plan& plan) { manyhead::run(plan, check_tensors(c.p, c.t), exec_of(1)); }
void run(test_case& c, const kernel_table& table) { run(c, make_plan(c.p, table, large_l2)); }

plan one_head_a_task(const plan& of) {
  plan plan = of;
  plan.heads_at_once = 1;
  plan.alone = cut_for(plan, 1);
  REQUIRE(schedule(plan, 1).tasks() == plan.tasks);
  return plan;
}

// --- how far results may be off --------------------------------------------------------------------------------------

struct precision {
  double base;      // absolute and relative
  double lse;       // relative
  double unit;      // of the arithmetic: half a unit in the last place of 1
  double storage;   // the same of out's dtype where that is narrower, else 0
  double smallest;  // denormal of out
};
precision precision_of(int32_t dtype) {
  switch (dtype) {
    case MH_DTYPE_F32:
      return {5e-6, 1e-6, FLT_EPSILON / 2, 0, FLT_TRUE_MIN};
    case MH_DTYPE_F64:
      return {1e-12, 1e-13, DBL_EPSILON / 2, 0, DBL_TRUE_MIN};
    case MH_DTYPE_BF16:
      return {5e-6, 1e-6, FLT_EPSILON / 2, std::ldexp(1, -8), std::ldexp(1, -133)};
    default:
      return {5e-6, 1e-6, FLT_EPSILON / 2, std::ldexp(1, -11), std::ldexp(1, -24)};
  }
}

// What rounding can do to the scores of each row, and the largest value that the row averages.
struct row_bounds {
  std::vector<double> score;  // [batch][heads][q_len][kv_len]: error of one score
  std::vector<double> row;    // [batch][heads][q_len]: the largest among keys of any weight
  std::vector<double> value;  // [batch][heads][q_len]
  double rounded = 0;         // of a weight, relative, where it is multiplied
};

row_bounds bounds_of(const test_case& c, const plan& plan, const attention_result& want) {
  const problem& p = c.p;
  const auto norms = [](const tensor& x) {
    std::vector<double> list, largest;
    tensor rows = {};
    rows.dims = {x.dims[0], x.dims[1], x.dims[2], 1};
    rows.each([&](index4 i) {
      double sum = 0, top = 0;
      for (i[3] = 0; i[3] < x.dims[3]; ++i[3]) {
        const double value = x.get(i);
        if (!std::isfinite(value)) continue;
        sum += value * value;
        top = std::max(top, std::fabs(value));
      }
      list.push_back(std::sqrt(sum));
      largest.push_back(top);
    });
    return std::pair(list, largest);
  };
  const std::vector<double> q = norms(c.q).first, k = norms(c.k).first, v = norms(c.v).second;
  // Scores of these are far apart, or equal whatever the rounding: no excuse.
  const bool exact = c.line.data == "huge" || c.line.data == "equal";
  const double unit = precision_of(p.dtype).unit;
  // Weights that are off by so much of themselves are as if scores were.
  const bool fast = (p.flags & MH_FLAG_FAST_EXP) != 0 && (p.outputs & ~MH_OUTPUT_LSE) == 0 && !p.is_f64();
  const double weight = fast ? 1.2e-4 : 0;
  row_bounds r;
  // What a unit loses of a weight (unit_number.hpp): of one part half a unit in the last place at most; of f16 in two of bf16
  // 2^-16. On a unit of f16 less.
  const bool matrix = plan.kernel == route_matrix;
  const bool one_part =
      p.dtype == MH_DTYPE_BF16 ? matrix || plan.unit_steps : matrix && fast && p.dtype == MH_DTYPE_F16;
  r.rounded = one_part ? std::ldexp(1, -8) : matrix && p.dtype == MH_DTYPE_F16 ? std::ldexp(1, -16) : 0;
  for (int64_t row = 0; row < p.batch * p.heads * p.q_len; ++row) {
    const int64_t b = row / p.q_len / p.heads, h = row / p.q_len % p.heads, i = row % p.q_len;
    const int64_t keys = (b * p.kv_heads + h / p.group()) * p.kv_len;
    double top = 0, value = 0;
    for (int64_t j = 0; j < p.kv_len; ++j) {
      const auto at_key = static_cast<size_t>(keys + j);
      double size = exact ? 0 : std::fabs(p.scale) * q[static_cast<size_t>(row)] * k[at_key];
      if (p.has_input(MH_INPUT_ALIBI))
        size += std::fabs(c.slopes.get({c.slopes.dims[0] > 1 ? b : 0, h, 0, 0}) *
                          static_cast<double>(position(p, c.t, b, i) - j));
      if (p.has_input(MH_INPUT_BIAS) && j < c.bias.dims[3]) {
        const double bias = std::fabs(c.bias.get({b, h, i, j}));
        if (bias < 1e25) size += bias;  // beside larger ones every score vanishes, in double too
      }
      r.score.push_back(4 * unit * size);
      if (!(want.weights[static_cast<size_t>(row * p.kv_len + j)] > 1e-12)) continue;
      top = std::max(top, r.score.back());
      value = std::max(value, v[at_key]);
    }
    r.row.push_back(top + 2 * weight);
    r.value.push_back(value);
  }
  return r;
}

// The distance in units in the last place of a float with u = half a unit of 1.
double ulps(double error, double x, double u) { return error / (std::ldexp(u, std::ilogb(std::fabs(x)) + 1)); }

// Compares all elements of an output; tolerance(i) is for the i-th.
template <class Tolerance>
std::string compare(const char* name, const tensor& x, const std::vector<double>& want, double unit,
                    Tolerance tolerance) {
  const std::vector<double> got = x.values();
  if (got.size() != want.size()) return std::string(name) + " has the wrong size";
  size_t wrong = 0, worst = 0;
  double worst_share = 0, worst_error = 0, worst_ulps = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    double share = 0;
    if (std::isfinite(want[i]) && std::isfinite(got[i])) {
      const double error = std::fabs(got[i] - want[i]);
      share = error / tolerance(i);
      worst_error = std::max(worst_error, error);
      if (want[i] != 0) worst_ulps = std::max(worst_ulps, ulps(error, want[i], unit));
    } else {
      share = std::isnan(want[i]) ? (std::isnan(got[i]) ? 0 : HUGE_VAL) : got[i] == want[i] ? 0 : HUGE_VAL;
    }
    if (!(share <= 1)) ++wrong;
    if (!(share <= worst_share)) {
      worst_share = share;
      worst = i;
    }
  }
  if (chosen.verbose)
    std::printf("    %-12s max error %.2e, %.3g ulp, %.3f of the tolerance\n", name, worst_error, worst_ulps,
                worst_share);
  if (wrong == 0) return "";
  char text[256];
  std::snprintf(text, sizeof text, "%s: %zu of %zu wrong; [%zu] is %.9g, must be %.9g +- %.2g. ", name, wrong,
                got.size(), worst, got[worst], want[worst], tolerance(worst));
  return text;
}

std::string compare_all(const test_case& c, const plan& plan, const attention_result& want) {
  const problem& p = c.p;
  const precision e = precision_of(p.dtype);
  const row_bounds bound = bounds_of(c, plan, want);
  const auto within = [&](double x, double wide) { return e.base + e.base * std::fabs(x) + wide; };
  const auto index = [](int64_t i) { return static_cast<size_t>(i); };
  std::string wrong = compare("out", c.out, want.out, e.storage > 0 ? e.storage : e.unit, [&](size_t i) {
    const size_t row = i / index(p.v_dim);
    const double x = std::fabs(want.out[i]), top = bound.value[row];
    return e.base * std::min(1.0, top) + (e.base + 1.001 * e.storage) * x + (bound.row[row] + bound.rounded) * top +
           4 * e.smallest;
  });
  if (p.has_output(MH_OUTPUT_LSE)) {
    const double base_of = p.lse_base == MH_LSE_BASE2 ? 1 / std::log(2.0) : 1;
    wrong += compare("lse", c.lse, want.lse, e.unit,
                     [&](size_t i) { return base_of * (e.base + bound.row[i]) + e.lse * std::fabs(want.lse[i]); });
  }
  if (p.has_output(MH_OUTPUT_WEIGHTS)) {
    wrong += compare("weights", c.weights, want.weights, e.unit, [&](size_t i) {
      return within(want.weights[i], 2 * want.weights[i] * bound.row[i / index(p.kv_len)]);
    });
  }
  const double widest = bound.row.empty() ? 0 : *std::max_element(bound.row.begin(), bound.row.end());
  if (p.has_output(MH_OUTPUT_MEAN_WEIGHTS)) {
    wrong += compare("mean_weights", c.mean_weights, want.mean_weights, e.unit,
                     [&](size_t i) { return within(want.mean_weights[i], 2 * want.mean_weights[i] * widest); });
  }
  if (p.has_output(MH_OUTPUT_COLUMN_SUMS)) {
    wrong += compare("column_sums", c.column_sums, want.column_sums, e.unit,
                     [&](size_t i) { return within(want.column_sums[i], 2 * want.column_sums[i] * widest); });
  }
  if (p.has_output(MH_OUTPUT_SCORES)) {
    wrong += compare("scores", c.scores, want.scores, e.unit,
                     [&](size_t i) { return within(want.scores[i], bound.score[i]); });
  }
  return wrong;
}

// Each row of weights sums to 1 where there is a key and no sink.
std::string check_sums(const test_case& c, const attention_result& want) {
  if (!c.p.has_output(MH_OUTPUT_WEIGHTS) || c.p.has_input(MH_INPUT_SINKS)) return "";
  const std::vector<double> got = c.weights.values();
  const auto keys = static_cast<size_t>(c.p.kv_len);
  for (size_t row = 0; row < want.lse.size(); ++row) {
    if (!std::isfinite(want.lse[row])) continue;
    long double exact = 0;  // many equal weights in double are each rounded the same way
    for (size_t j = 0; j < keys; ++j) exact += got[row * keys + j];
    const auto sum = static_cast<double>(exact);
    if (!(std::fabs(sum - 1) <= 16 * precision_of(c.p.dtype).unit))
      return "a row of weights sums to " + std::to_string(sum);
  }
  return "";
}

// Column sums are added up task by task, so their last bits may depend on the task size; so may which NaN it is.
std::vector<double> bits_of(test_case& c) {
  std::vector<double> all;
  for (const tensor* x : c.outputs())
    if (x->base != nullptr && x != &c.column_sums)
      for (const double value : x->values()) all.push_back(std::isnan(value) ? NAN : value);
  return all;
}
bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

bool takes_routes_of(const plan& a, const plan& b) { return a.kernel == b.kernel && a.last_rows == b.last_rows; }

void check_line(const problem_line& line) {
  INFO(line.text);  // names the line where a guard page stops a kernel
  const auto has_unit = [&](const kernel_table* table) {
    return table->dtype[line.problem.dtype].attention[route_matrix] != nullptr;
  };
  if (chosen.brief && line.on_unit && std::none_of(chosen.tables.begin(), chosen.tables.end(), has_unit)) return;
  test_case c(line);
  const attention_result want = reference(c.p, c.t);
  if (line.data == "poison" || line.data == "nanbias") {
    const auto is_finite = [](double x) { return std::isfinite(x); };
    CHECK(std::any_of(want.out.begin(), want.out.end(), is_finite));
    CHECK(!std::all_of(want.out.begin(), want.out.end(), is_finite));
  }
  for (const kernel_table* table : chosen.tables) {
    const plan large = make_plan(c.p, *table, large_l2);
    if (chosen.verbose)
      std::printf("%s: %s@%s\n", line.text.c_str(),
                  large.kernel == route_decode   ? "decode"
                  : large.kernel == route_matrix ? "matrix"
                                                 : "tile",
                  table->isa);
    const std::string where = line.text + " @" + table->isa + ": ";
    const dtype_kernels& kernels = table->dtype[c.p.dtype];
    if (line.on_unit && has_unit(table)) {
      const bool few = c.p.rows() <= 24;  // which not all units take
      CHECK_MESSAGE((few ? large.unit_steps == (kernels.unit_steps != 0) : large.kernel == route_matrix),
                    where << "not on the matrix unit");
    }
    c.clear_outputs();
    run(c, *table);
    const std::string wrong = compare_all(c, large, want);
    CHECK_MESSAGE(wrong.empty(), where << wrong);
    const std::string sums = check_sums(c, want);
    CHECK_MESSAGE(sums.empty(), where << sums);
    const std::vector<double> first = bits_of(c);
    const std::string damage = c.damage();
    CHECK_MESSAGE(damage.empty(), where << damage);
    std::vector<plan> others;
    const plan small = make_plan(c.p, *table, small_l2);
    if (small.block_q != large.block_q || small.prefetch != large.prefetch || small.keeps != large.keeps) {
      others.push_back(small);
      for (const cpu_core core : {cpu_core::zen4, cpu_core::zen5, cpu_core::intel}) {
        const plan there = make_plan(c.p, *table, small_l2, core, core == cpu_core::intel ? large_l3 : 0);
        const bool decodes = small.kernel == route_decode || there.last_rows > 0;
        if (decodes && takes_routes_of(there, small)) others.push_back(there);
      }
    }
    if (large.heads_at_once > 1) others.push_back(one_head_a_task(large));
    const auto check_run = [&](const plan& other) {
      c.clear_outputs();
      run(c, other);
      const std::vector<double> bits = bits_of(c);
      const std::string more_wrong = compare_all(c, other, want);
      CHECK_MESSAGE(more_wrong.empty(), where << "other task sizes: " << more_wrong);
      const std::string more_damage = c.damage();
      CHECK_MESSAGE(more_damage.empty(), where << more_damage);
      return bits;
    };
    const plan elsewhere = make_plan(c.p, *table, small_l2, cpu_core::zen5);
    if (!takes_routes_of(elsewhere, large)) check_run(elsewhere);  // whose bits may be others
    for (const plan& other : others) {
      CHECK_MESSAGE(same_bits(first, check_run(other)),
                    where << "other task sizes, or what is asked for, give other bits");
    }
  }
}

TEST_CASE("problems that fill its tiles take the matrix unit where there is one") {
  for (const kernel_table* table : chosen.tables) {
    const auto route_of = [&](const std::string& line) {
      return make_plan(test_case(parse_problem(line), false).p, *table, large_l2).kernel;
    };
    CHECK((table->dtype[MH_DTYPE_F64].attention[route_matrix] == nullptr));
    for (const char* line : {"bf16 b1 h8 q16 kv32 d64", "bf16 b1 h8 q64 kv64 d64 weights scores=raw",
                             "bf16 b1 h32/1 q1 kv5000 d100", "f16 b1 h8 q32 kv64 d64", "f32 b1 h8 q500 kv500 d64",
                             "f32 b1 h8 q500 kv500 d64 causal mask", "f32 b1 h8 q128 kv256 d64",
                             "f32 b1 h16/8 q64 kv256 d64", "f32 b1 h8 q96 kv512 d64", "f32 b1 h8 q256 kv256 d64 causal",
                             "f32 b1 h8 q128 kv128 d64", "f32 b1 h8 q120 kv256 d64", "f32 b1 h8 q224 kv224 d32"}) {
      const problem p = test_case(parse_problem(line), false).p;
      const dtype_kernels& kernels = table->dtype[p.dtype];
      const int64_t rows = p.rows();
      const bool has_unit = kernels.attention[route_matrix] != nullptr && rows >= kernels.matrix_rows;
      const bool as_steps = kernels.unit_steps != 0 && rows <= 24 && p.head_dim % 32 == 0;
      CHECK(route_of(line) == (as_steps ? route_decode : has_unit ? route_matrix : route_tile));
    }
    // Of f16, both sides of what its kernels ask for: 63 keys are too few where it comes in two parts.
    const dtype_kernels& f16 = table->dtype[MH_DTYPE_F16];
    if (f16.attention[route_matrix] != nullptr) {
      const std::string keys[] = {std::to_string(f16.matrix_keys - 1), std::to_string(f16.matrix_keys)};
      CHECK(route_of("f16 b1 h8 q64 kv" + keys[0] + " d64") == route_tile);
      CHECK(route_of("f16 b1 h8 q64 kv" + keys[1] + " d64") == route_matrix);
      CHECK(f16.matrix_keys ==
            (table->isa == std::string("amx_fp16") || table->isa == std::string("emu512") ? 32 : 64));
    }
    for (const char* line :
         {"bf16 b1 h8 q64 kv27 d64", "f16 b1 h8 q64 kv31 d64", "f32 b1 h8 q95 kv640 d64", "f32 b1 h8 q100 kv100 d128",
          "f32 b1 h8 q128 kv112 d64", "f32 b1 h8 q144 kv144 d64", "f32 b1 h8 q200 kv200 d64 causal",
          "f32 b1 h8 q640 kv640 d64 window=16,0", "f32 b1 h8 q200 kv200 d32", "f32 b1 h8 q640 kv63 d64",
          "f32 b1 h8 q640 kv640 d40", "f64 b1 h8 q640 kv640 d64"})
      CHECK(route_of(line) == route_tile);
    CHECK(route_of("bf16 b1 h8 q1 kv64 d64") == route_decode);
  }
}

TEST_CASE("tasks on the unit have up to 32 panels where L2 has room, and no mask or bias is read beside") {
  for (const kernel_table* table : chosen.tables) {
    const auto rows_of = [&](const std::string& line, int64_t l2) {
      const plan plan = make_plan(test_case(parse_problem("bf16 b1 h8 q1024 " + line), false).p, *table, l2);
      return plan.kernel == route_matrix ? plan.block_q : 0;
    };
    if (rows_of("kv1024 d64", large_l2) == 0) continue;
    CHECK(rows_of("kv1024 d64", 2 * large_l2) == 1024);
    CHECK(rows_of("kv1024 d64 causal", 4 * large_l2) == 1024);
    CHECK(rows_of("kv1024 d64", large_l2) == 512);
    CHECK(rows_of("kv1024 d128", 2 * large_l2) == 512);
    CHECK(rows_of("kv1024 d64 bias", 2 * large_l2) == 512);
    CHECK(rows_of("kv1024 d64 mask", 2 * large_l2) == 512);
  }
}

TEST_CASE("a few rows take the unit in the decode route where it has kernels for them") {
  for (const kernel_table* table : chosen.tables) {
    const auto on_unit = [&](const std::string& line) {
      const plan plan = make_plan(test_case(parse_problem(line), false).p, *table, large_l2);
      CHECK((plan.unit_steps == (plan.call.unit_steps != 0) && (!plan.unit_steps || plan.kernel == route_decode)));
      const bool tiles = plan.table->dtype[plan.p.dtype].unit_steps == steps_of_tiles;
      CHECK((!plan.unit_steps || (plan.block_kv == 32) == tiles));
      return plan.unit_steps;
    };
    // One row and two of so many keys, by 16 MB of a batch entry.
    const auto most_keys = [&](const char* line) {
      return make_plan(test_case(parse_problem(line), false).p, *table, large_l2).call.unit_keys;
    };
    if (table->dtype[MH_DTYPE_BF16].unit_steps == steps_of_pairs) {
      for (const char* line :
           {"bf16 b1 h2 q2 kv100 d64", "bf16 b9 h2 q1 kv50000 d64", "bf16 b9 h4/2 q1 kv7 d32 v96 lens"})
        CHECK(most_keys(line) == 32768);
      CHECK(most_keys("bf16 b1 h2 q3 kv100 d64") > int64_t{1} << 40);
    }
    const std::string isa = table->isa;
    const bool tiles = isa == "amx" || isa == "amx_fp16" || isa == "emu512";
    const bool pairs = isa == "avx512_bf16" || isa == "emu128";
    const std::tuple<std::string, bool, bool> dtypes[] = {{"bf16 ", tiles, pairs},
                                                          {"f16 ", tiles && isa != "amx", false},
                                                          {"f32 ", false, false},
                                                          {"f64 ", false, false}};
    for (const auto& [dtype, by_tiles, by_pairs] : dtypes) {
      for (const char* line :
           {"b1 h8 q3 kv32 d64", "b1 h96/4 q1 kv5000 d128", "b1 h2 q24 kv40 d32", "b1 h2 q6 kv40 d256",
            "b1 h2 q16 kv40 d160 v128", "b1 h2 q4 kv40 d64 causal align=br mask bias", "b1 h2 q4 kv40 d64 bshd weights",
            "b1 h2 q4 kv40 d64 strides=lastdim"})
        CHECK(on_unit(dtype + line) == (by_tiles || by_pairs));
      for (const char* line :
           {"b1 h8 q2 kv320 d64", "b1 h8 q1 kv4 d64", "b1 h8 q25 kv320 d64", "b1 h8 q28 kv16 d64", "b1 h8 q8 kv15 d64",
            "b1 h8 q4 kv31 d64", "b1 h8 q5 kv320 d256", "b1 h8 q17 kv320 d256", "b1 h32/8 q1 kv20 d128",
            "b1 h4 q2 kv20000 d64", "b1 h8 q4 kv320 d40", "b1 h8 q4 kv320 d64 v72", "b1 h8 q20 kv320 d33 v32"})
        CHECK(on_unit(dtype + line) == by_pairs);
      for (const char* line :
           {"b1 h8 q29 kv320 d64", "b1 h8 q9 kv15 d64", "b1 h8 q4 kv320 d31 v64", "b1 h8 q4 kv320 d64 v24",
            "b1 h8 q21 kv320 d40", "b1 h8 q4 kv15 d40", "b1 h8 q4 kv320 d64 softcap=1e37",
            "b1 h8 q4 kv320 d64 scale=2e5", "b1 h8 q4 kv320 d64 scale=-1e-31"})
        CHECK(!on_unit(dtype + line));
    }
  }
}

// Rows of padding are masked whole. Were what they share with others done again for them, without the unit, those would have
// other bits.
TEST_CASE("a row that sees no key changes no bit of those beside it on the unit") {
  for (const kernel_table* table : chosen.tables) {
    for (const char* line : {"bf16 b1 h3 q5 kv300 d64 mask lse", "bf16 b1 h2 q20 kv600 d32 mask keymask lse",
                             "f16 b1 h3 q5 kv300 d64 mask lse", "bf16 b1 h4/2 q40 kv70 d64 mask lse",
                             "f32 b1 h2 q192 kv256 d64 mask lse", "bf16 b1 h2 q60 kv700 d64 mask"}) {
      const std::string where = std::string(line) + " @" + table->isa;
      INFO(where);
      test_case c(parse_problem(line));
      const plan plan = make_plan(c.p, *table, large_l2);
      if (!plan.unit_steps && plan.kernel != route_matrix) continue;
      for (tensor* x : {&c.k, &c.v})  // of keys that no row sees
        x->each([&](const index4& i) { x->set(i, std::isfinite(x->get(i)) ? x->get(i) : 0.5); });
      const auto others = [&](bool hidden) {
        c.mask.each([&](const index4& i) { c.mask.set(i, i[2] != 1 || (!hidden && i[3] < 3) ? 1 : 0); });
        c.clear_outputs();
        run(c, plan);
        std::vector<double> bits;
        c.out.each([&](const index4& i) {
          if (i[2] != 1) bits.push_back(c.out.get(i));
          if (i[2] == 1 && hidden) CHECK(c.out.get(i) == 0);
        });
        return bits;
      };
      CHECK(same_bits(others(true), others(false)));
    }
  }
}

TEST_CASE("equal values average to themselves, denormal ones too") {
  for (const kernel_table* table : chosen.tables) {
    for (const char* dtype : dtype_names) {
      for (const char* shape :
           {" b1 h2 q1 kv1500 d64", " b1 h1 q16 kv300 d64", " b1 h1 q70 kv140 d64", " b1 h2 q3 kv33 d40"}) {
        const std::string line = dtype + std::string(shape);
        const std::string where = line + " @" + table->isa;
        INFO(where);
        test_case c(parse_problem(line));
        // 1 and 40 of the smallest numbers, 1.5 of the smallest normal one.
        const int smallest = c.p.dtype == MH_DTYPE_F64   ? -1074
                             : c.p.dtype == MH_DTYPE_F32 ? -149
                             : c.p.dtype == MH_DTYPE_F16 ? -24
                                                         : -133;
        const int normal = c.p.dtype == MH_DTYPE_F64 ? -1022 : c.p.dtype == MH_DTYPE_F16 ? -14 : -126;
        const double step = std::ldexp(1, smallest);
        for (const double value : {step, 40 * step, std::ldexp(1.5, normal)}) {
          CAPTURE(value);
          c.v.each([&](const index4& i) { c.v.set(i, value); });
          run(c, *table);
          double worst = 0;
          c.out.each([&](const index4& i) { worst = std::max(worst, std::fabs(c.out.get(i) - value)); });
          // f32 and f64 add up products that are denormal themselves.
          const bool wide = c.p.dtype == MH_DTYPE_F32 || c.p.dtype == MH_DTYPE_F64;
          CHECK(worst <= (wide ? step * static_cast<double>(c.p.kv_len) : 0));
        }
      }
    }
  }
}

// A prompt's later tokens, padding, slots of a cache that hold anything. On a unit all rows of a panel or head are one product.
TEST_CASE("what keys hold changes no bit of rows that do not attend them") {
  for (const kernel_table* table : chosen.tables) {
    for (const char* dtype : dtype_names) {
      for (const char* shape :
           {" b2 h4/2 q25 kv100 d64 mask lse weights", " b1 h1 q110 kv150 d32 causal align=br lse",
            " b1 h1 q70 kv140 d32 v48 bias lse", " b1 h1 q100 kv560 d32 window=60,20 align=br keymask",
            " b1 h1 q60 kv140 d40 mask softcap=10 strides=lastdim", " b1 h8/2 q3 kv300 d64 mask lse weights",
            " b1 h2/1 q2 kv1500 d64 causal align=br lse", " b1 h4/2 q3 kv200 d96 v32 bias",
            " b2 h2 q5 kv70 d64 bshd mask", " b1 h2 q1 kv700 d64 keymask lse", " b1 h1 q60 kv1100 d32 mask lse",
            " b2 h1 q60 kv100 d64 lens keymask sinks", " b1 h3 q4 kv40 d32 strides=lastdim mask"}) {
        const std::string line = dtype + std::string(shape);
        const std::string where = line + " @" + table->isa;
        INFO(where);
        test_case c(parse_problem(line));
        const plan plan = make_plan(c.p, *table, large_l2);
        for (tensor* x : {&c.k, &c.v})  // of keys that no row sees
          x->each([&](const index4& i) { x->set(i, std::isfinite(x->get(i)) ? x->get(i) : 0.5); });
        // Some dims are so small that care with sums would make their products denormal.
        const double tiny = c.p.dtype == MH_DTYPE_F64 ? 1e-304 : c.p.dtype == MH_DTYPE_F16 ? 1e-6 : 1e-34;
        c.v.each([&](const index4& i) {
          if (i[3] % 5 == 2) c.v.set(i, tiny * c.v.get(i));
          if (i[3] % 5 == 4) c.v.set(i, -0.0);
        });
        // Of each head two keys that fewest rows attend, of one of them some do.
        std::set<std::array<int64_t, 3>> changed;
        const int64_t rows = c.p.rows();
        const auto row_attends = [&](int64_t b, int64_t kv_head, int64_t row, int64_t key) {
          return attends(c.p, c.t, b, kv_head * c.p.group() + row / c.p.q_len, row % c.p.q_len, key);
        };
        for (int64_t b = 0; b < c.p.batch; ++b) {
          for (int64_t kv_head = 0; kv_head < c.p.kv_heads; ++kv_head) {
            int64_t fewest[2] = {rows + 1, rows + 1}, which[2] = {0, 0};
            for (int64_t key = 0; key < c.p.kv_len; ++key) {
              int64_t n = 0;
              for (int64_t row = 0; row < rows; ++row) n += row_attends(b, kv_head, row, key);
              for (const int some : {0, 1})
                if (n >= some && n < fewest[some]) fewest[some] = n, which[some] = key;
            }
            changed.insert({b, kv_head, which[0]});
            if (fewest[1] < rows) changed.insert({b, kv_head, which[1]});
          }
        }
        const auto attends_changed = [&](int64_t b, int64_t h, int64_t i) {
          return std::any_of(changed.begin(), changed.end(), [&](const std::array<int64_t, 3>& x) {
            return x[0] == b && x[1] == h / c.p.group() && attends(c.p, c.t, b, h, i, x[2]);
          });
        };
        const auto bits = [&] {
          c.clear_outputs();
          run(c, plan);
          std::vector<double> all;
          for (const tensor* x : {&c.out, &c.lse, &c.weights}) {
            if (x->base == nullptr) continue;
            x->each([&](const index4& i) {
              const bool last = c.p.q_len > 1 && i[2] == c.p.q_len - 1;
              if (!last && !attends_changed(i[0], i[1], i[2])) all.push_back(x->get(i));
            });
          }
          return all;
        };
        const std::vector<double> as_it_is = bits();
        CHECK(!as_it_is.empty());
        const double large = c.p.dtype == MH_DTYPE_F16 ? 6e4 : 3e38;
        for (const double held : {std::nan(""), HUGE_VAL, large}) {
          CAPTURE(held);
          const auto fill = [&](tensor& x, int64_t dim) {
            x.each([&](const index4& i) {
              if (changed.contains({i[0], i[1], i[2]}) && i[3] % 5 == dim) x.set(i, i[2] % 2 ? held : -held);
            });
          };
          fill(c.v, 1);
          c.v.each([&](const index4& i) {  // 0 times it is a zero of its sign
            if (changed.contains({i[0], i[1], i[2]}) && i[3] % 5 == 4) c.v.set(i, std::isnan(held) ? 1 : -1);
          });
          CHECK(same_bits(bits(), as_it_is));
          fill(c.k, 3);
          CHECK(same_bits(bits(), as_it_is));
        }
        // Nor what another row of Q is.
        for (const double held : {std::nan(""), HUGE_VAL, large}) {
          CAPTURE(held);
          c.q.each([&](const index4& i) {
            if (c.p.q_len > 1 && i[2] == c.p.q_len - 1 && i[3] == 5) c.q.set(i, held);
          });
          CHECK(same_bits(bits(), as_it_is));
        }
      }
    }
  }
}

// Those that are tiny may be done again without the unit, those near the largest number with care.
TEST_CASE("tiny and large results have the bits that they have beside other rows") {
  for (const kernel_table* table : chosen.tables) {
    for (const char* dtype : dtype_names) {
      for (const char* shape : {" b1 h2 q70 kv140 d64 mask", " b1 h2 q5 kv140 d64 mask", " b1 h1 q192 kv256 d64 mask",
                                " b1 h4/2 q1 kv70 d40 mask"}) {
        const std::string line = dtype + std::string(shape);
        const std::string where = line + " @" + table->isa;
        INFO(where);
        test_case c(parse_problem(line));
        const double largest = largest_of(c.p.dtype);
        c.k.each([&](const index4& i) { c.k.set(i, std::isfinite(c.k.get(i)) ? c.k.get(i) : 0.5); });
        // A row of one key, whose values are its results.
        c.mask.each([&](const index4& i) {
          if (i[1] == 0 && i[2] == 0) c.mask.set(i, i[3] == 0);
        });
        random_numbers random(1);
        const auto attends_last = [&](int64_t h, int64_t i) { return attends(c.p, c.t, 0, h, i, c.p.kv_len - 1); };
        const auto bits = [&](double value, bool varies, double last) {
          random = random_numbers(1);
          c.v.each([&](const index4& i) {
            const double each = value * (varies ? random.normal() : i[3] % 2 ? -1 : 1);
            c.v.set(i, i[2] == c.p.kv_len - 1 ? last : each);
          });
          c.clear_outputs();
          run(c, *table);
          std::vector<double> all;
          c.out.each([&](const index4& i) {
            if (!attends_last(i[1], i[2])) all.push_back(c.out.get(i));
          });
          return all;
        };
        CHECK(same_bits(bits(0x1p-110, true, 0), bits(0x1p-110, true, 1)));
        CHECK(same_bits(bits(largest, false, 1), bits(largest, false, std::nan(""))));
        CHECK(same_bits(bits(largest, false, 1), bits(largest, false, HUGE_VAL)));
      }
    }
  }
}

TEST_CASE("problems") {
  int lines = 0;
  for (const problem_line& line : read_problems(MH_PROBLEMS_FILE)) {
    if (line.text.find(chosen.line) == std::string::npos) continue;
    ++lines;
    check_line(line);
    const mh_problem& p = line.problem;
    const double cost = static_cast<double>(p.batch * p.heads * p.q_len) * static_cast<double>(p.kv_len) *
                        static_cast<double>(p.head_dim + (p.v_dim ? p.v_dim : p.head_dim));
    if (p.dtype != MH_DTYPE_F32 || cost > quick) continue;
    for (const char* dtype : {"f64", "bf16", "f16"}) check_line(parse_problem(dtype + line.text.substr(3)));
  }
  CHECK(lines > 0);
}

// --- properties ------------------------------------------------------------------------------------------------------

// Results that show what weights lose: the difference of two near a half, and the sum of many beside a large one whose value
// is 0, as of a sink.
TEST_CASE("weights of f16 are exact to 16 bits of themselves, whatever multiplies them") {
  for (const kernel_table* table : chosen.tables) {
    for (const char* line : {"f16 b1 h1 q1 kv32 d32 scale=1", "f16 b1 h2 q5 kv512 d64 scale=1",
                             "f16 b1 h1 q20 kv33 d32 scale=1", "f16 b1 h1 q64 kv512 d32 scale=1"}) {
      const std::string where = std::string(line) + " @" + table->isa;
      INFO(where);
      test_case c(parse_problem(line));
      c.q.each([&](const index4& i) {
        c.q.set(i, i[3] == 0 ? 1 : i[3] == 1 ? 0.0007 * static_cast<double>(i[2] + 1) : 0);
      });
      c.k.each([&](const index4& i) { c.k.set(i, i[3] == 0 && i[2] > 1 ? -30 : i[3] == 1 && i[2] == 0 ? 1 : 0); });
      c.v.each([&](const index4& i) { c.v.set(i, i[2] == 0 ? 1 : i[2] == 1 ? -1 : 0); });
      run(c, *table);
      c.out.each([&](const index4& i) {
        const double want = std::tanh(c.q.get({i[0], i[1], i[2], 1}) / 2);
        CHECK(std::fabs(c.out.get(i) - want) <= 0x1p-16 + 0x1p-10 * want);
      });
      const double score = -13.4375, small = std::exp(score) * static_cast<double>(c.p.kv_len - 1);
      c.k.each([&](const index4& i) { c.k.set(i, i[3] == 0 && i[2] > 0 ? score : 0); });
      c.v.each([&](const index4& i) { c.v.set(i, i[2] == 0 ? 0 : 1000); });
      run(c, *table);
      const double want = 1000 * small / (1 + small);
      c.out.each([&](const index4& i) { CHECK(std::fabs(c.out.get(i) - want) <= 0x1p-10 * want); });
    }
  }
}

TEST_CASE("heads that share a task have the bits that they have alone") {
  for (const kernel_table* table : chosen.tables) {
    for (const char* dtype : dtype_names) {
      std::vector<const char*> shapes = {
          " b2 h7 q2 kv40 d24",        " b2 h14/7 q1 kv150 d24",      " b2 h7 q1 kv40 d8",
          " b2 h7 q1 kv150 d24 bshd",  " b2 h14/7 q1 kv150 d40 bshd", " b2 h7 q1 kv150 d8 bshd",
          " b1 h16 q1 kv150 d64 bshd", " b1 h33 q1 kv300 d136 bshd",  " b1 h33 q2 kv130 d136 bshd"};
      // And products of a matrix unit, with rows enough for it.
      if (dtype == std::string("bf16") || dtype == std::string("f16"))
        shapes.insert(shapes.end(),
                      {" b2 h7 q3 kv100 d32", " b2 h14/7 q2 kv150 d64 bshd", " b1 h32/16 q2 kv150 d64 bshd"});
      if (table->dtype[MH_DTYPE_BF16].unit_steps == steps_of_pairs && dtype == std::string("bf16"))
        shapes.push_back(" b2 h7 q7 kv100 d32");
      // Of more heads than a task takes: turns of V, and of K, that are shorter than a sum.
      if (table->lanes >= 16)
        shapes.insert(shapes.end(),
                      {" b1 h32 q5 kv150 d64 bshd", " b1 h16 q9 kv150 d64 bshd", " b1 h16 q7 kv150 d64 bshd",
                       " b1 h18 q7 kv150 d64 bshd"});  // one of zeros more would be 8 x 16 rows, and 8 x 18: too many
      for (const char* shape : shapes) {
        const std::string line = dtype + std::string(shape) + " mask lse";
        CAPTURE(line);
        test_case c(parse_problem(line));
        const bool side_by_side = line.find("bshd") != std::string::npos;
        const plan together = make_plan(c.p, *table, side_by_side ? small_l2 : large_l2);
        REQUIRE(
            (together.kernel == route_decode && together.heads_at_once >= 4 && takes_turns(together) == side_by_side));
        // Of one head a value is infinite, which only care keeps from its other dims; of the next they are so small that
        // the weights of careful rows would make them denormal; of one no row sees a key, and it has no numbers; the
        // next sees none of one tile.
        const double tiny = c.p.dtype == MH_DTYPE_F64 ? 1e-304 : c.p.dtype == MH_DTYPE_F16 ? 1e-6 : 1e-35;
        for (tensor* x : {&c.k, &c.v}) {  // of keys that no row sees
          x->each([&](const index4& i) { x->set(i, std::isfinite(x->get(i)) ? x->get(i) : 0.5); });
        }
        c.v.each([&](const index4& i) {
          if (i[1] == 1 && i[2] == 3 && i[3] == 1) c.v.set(i, HUGE_VAL);
          if (i[1] == 2) c.v.set(i, tiny * c.v.get(i));
          if (i[1] == 3) c.v.set(i, std::nan(""));
        });
        c.mask.each([&](const index4& i) {
          const int64_t head = i[1] / c.p.group();
          if (head == 3 || (head == 4 && i[3] / together.block_kv == 1)) c.mask.set(i, 0);
          if (head == 1 && i[3] == 3 && i[0] == 0) c.mask.set(i, 1);
        });
        const auto bits = [&](const plan& plan) {
          c.clear_outputs();
          run(c, plan);
          return bits_of(c);
        };
        CHECK(same_bits(bits(one_head_a_task(together)), bits(together)));
        if (side_by_side)  // in shorter turns
          CHECK(same_bits(bits(make_plan(c.p, *table, small_l2, cpu_core::zen5)), bits(together)));
        size_t finite = 0, zeros = 0;
        c.out.each([&](const index4& i) {
          const double value = c.out.get(i);
          const int64_t head = i[1] / c.p.group();
          if (head == 3) zeros += value == 0;
          if (head == 1) finite += std::isfinite(value);
          if (head != 1) CHECK(std::isfinite(value));
        });
        const auto head_size = static_cast<size_t>(c.p.batch * c.p.rows() * c.p.v_dim);
        CHECK(zeros == head_size);
        CHECK((finite > 0 && finite < head_size));
      }
    }
  }
}

// `storage`: what each part or result lost when it was stored; parts are averages of numbers around 1.
void check_near(const tensor& a, const tensor& b, double storage) {
  const std::vector<double> x = a.values(), y = b.values();
  REQUIRE(x.size() == y.size());
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i)
    worst = std::max(worst, std::fabs(x[i] - y[i]) / (1e-5 + storage + (1e-5 + 2 * storage) * std::fabs(x[i])));
  CHECK(worst <= 1);
}

TEST_CASE("the order of the keys does not matter") {
  for (const kernel_table* table : chosen.tables) {
    for (const char* dtype : dtype_names) {
      for (const char* shape : {" b2 h4/2 q19 kv203 d24", " b2 h4/2 q1 kv203 d24"}) {
        const problem_line line = parse_problem(dtype + std::string(shape) + " mask bias keymask softcap=20 lse");
        CAPTURE(line.text);
        test_case a(line), b(line);
        for (tensor test_case::* member :
             {&test_case::k, &test_case::v, &test_case::mask, &test_case::bias, &test_case::key_mask}) {
          tensor& from = a.*member;
          tensor& to = b.*member;
          const size_t dim = member == &test_case::key_mask                             ? 1
                             : member == &test_case::mask || member == &test_case::bias ? 3
                                                                                        : 2;
          from.each([&](index4 i) {
            const double value = from.get(i);
            i[dim] = i[dim] * 74 % 203;  // 74 and 203 have no common factor: a permutation
            to.set(i, value);
          });
        }
        b.remember_inputs();
        run(a, *table);
        run(b, *table);
        check_near(a.out, b.out, precision_of(a.p.dtype).storage);
        check_near(a.lse, b.lse, 0);
        CHECK(b.damage() == "");
      }
    }
  }
}

TEST_CASE("two halves of the keys merge to the whole") {
  for (const kernel_table* table : chosen.tables) {
    for (const char* dtype : dtype_names) {
      for (const char* shape : {" b2 h4/2 q33 kv700 d40 v24", " b2 h4/2 q1 kv1500 d40 v24"}) {
        for (const char* base : {" lse", " lse2"}) {
          const problem_line line = parse_problem(dtype + std::string(shape) + base);
          CAPTURE(line.text);
          test_case whole(line), half(line);
          run(whole, *table);
          const int64_t cut = whole.p.kv_len / 3;
          const auto size = static_cast<int64_t>(tensor::size_of(whole.p.dtype));
          std::vector<unsigned char> outs, lses;  // two states, one after another
          const auto append = [](std::vector<unsigned char>& to, const tensor& x) {
            x.each([&](const index4& i) { to.insert(to.end(), x.place(i), x.place(i) + tensor::size_of(x.type)); });
          };
          for (const int64_t begin : {int64_t{0}, cut}) {
            half.p.kv_len = begin == 0 ? cut : whole.p.kv_len - cut;
            half.t.k = static_cast<const char*>(whole.t.k) + begin * whole.p.k_strides[2] * size;
            half.t.v = static_cast<const char*>(whole.t.v) + begin * whole.p.v_strides[2] * size;
            run(half, *table);
            append(outs, half.out);
            append(lses, half.lse);
          }
          merge_args m{};
          m.states = 2;
          m.heads = whole.p.heads;
          m.q_len = whole.p.q_len;
          m.v_dim = whole.p.v_dim;
          m.outs = outs.data();
          m.lses = lses.data();
          m.out = half.t.out;
          m.lse = half.t.lse;
          m.lses_base = m.lse_base = whole.p.lse_base;
          std::copy_n(half.p.out_strides, 4, m.out_strides);
          std::copy_n(half.p.out_strides, 4, m.outs_strides + 1);
          std::copy_n(half.p.lse_strides, 3, m.lse_strides);
          std::copy_n(half.p.lse_strides, 3, m.lses_strides + 1);
          const int64_t rows = whole.p.batch * whole.p.heads * whole.p.q_len;
          m.outs_strides[0] = rows * whole.p.v_dim;
          m.lses_strides[0] = rows;
          half.clear_outputs();
          table->dtype[whole.p.dtype].merge(&m, 0, rows / 2);
          table->dtype[whole.p.dtype].merge(&m, rows / 2, rows);
          check_near(whole.out, half.out, precision_of(whole.p.dtype).storage);
          check_near(whole.lse, half.lse, 0);
        }
      }
    }
  }
}

// merge and merge_real against the formula; states without keys hold NaN.
void check_merge(const kernel_table& table, int32_t dtype, bool from_real, int64_t states, int64_t v_dim) {
  INFO(std::string(table.isa));
  INFO(std::string(dtype_names[dtype]));
  CAPTURE(from_real);
  CAPTURE(states);
  CAPTURE(v_dim);
  constexpr int64_t rows = 12;
  random_numbers random(static_cast<uint64_t>(states * 1000 + v_dim));
  const int32_t real = dtype == MH_DTYPE_F64 ? MH_DTYPE_F64 : MH_DTYPE_F32;
  tensor outs{from_real ? real : dtype, {states, rows, v_dim, 1}, {rows * v_dim, v_dim, 1, 0}, {}, nullptr};
  tensor lses{real, {states, rows, 1, 1}, {rows, 1, 0, 0}, {}, nullptr};
  tensor out{dtype, {rows, v_dim, 1, 1}, {2 * v_dim + 1, 2, 0, 0}, {}, nullptr};  // the last stride 2
  tensor lse{real, {rows, 1, 1, 1}, {3, 0, 0, 0}, {}, nullptr};
  for (tensor* x : {&outs, &lses}) x->allocate(true, false, poison_byte);
  for (tensor* x : {&out, &lse}) x->allocate(true, false, canary_byte);
  lses.each([&](const index4& i) {
    const bool none = i[1] == 0 || random.below(4) == 0;  // row 0 has no keys in any state
    lses.set(i, none ? -HUGE_VAL : i[1] % 3 == 0 ? 900 + random.normal() : 3 * random.normal());
    for (int64_t d = 0; d < v_dim; ++d) outs.set({i[0], i[1], d, 0}, none ? std::nan("") : random.normal());
  });
  merge_args m{};
  m.states = states;
  m.heads = 3;
  m.q_len = 2;
  m.v_dim = v_dim;
  m.outs = outs.base;
  m.lses = lses.base;
  m.out = out.base;
  m.lse = lse.base;
  m.lses_base = MH_LSE_BASE2;
  m.lse_base = MH_LSE_NATURAL;
  const int64_t outs_strides[] = {rows * v_dim, 6 * v_dim, 2 * v_dim, v_dim, 1}, lses_strides[] = {rows, 6, 2, 1};
  const int64_t out_strides[] = {6 * out.strides[0], 2 * out.strides[0], out.strides[0], 2}, lse_strides[] = {18, 6, 3};
  std::copy_n(outs_strides, 5, m.outs_strides);
  std::copy_n(lses_strides, 4, m.lses_strides);
  std::copy_n(out_strides, 4, m.out_strides);
  std::copy_n(lse_strides, 3, m.lse_strides);
  const dtype_kernels& kernels = table.dtype[dtype];
  (from_real ? kernels.merge_real : kernels.merge)(&m, 0, 5);
  (from_real ? kernels.merge_real : kernels.merge)(&m, 5, rows);
  const precision e = precision_of(dtype);
  for (int64_t row = 0; row < rows; ++row) {
    double top = -HUGE_VAL, sum = 0;
    for (int64_t s = 0; s < states; ++s) top = std::max(top, lses.get({s, row, 0, 0}));
    for (int64_t s = 0; s < states && top > -HUGE_VAL; ++s) sum += std::exp2(lses.get({s, row, 0, 0}) - top);
    const double want_lse = top > -HUGE_VAL ? (top + std::log2(sum)) * std::log(2.0) : -HUGE_VAL;
    const double got_lse = lse.get({row, 0, 0, 0});
    CHECK((got_lse == want_lse || std::fabs(got_lse - want_lse) <= e.lse * (1 + std::fabs(want_lse))));
    double worst = 0;
    for (int64_t d = 0; d < v_dim; ++d) {
      double want = 0;
      for (int64_t s = 0; s < states; ++s) {
        const double share = top > -HUGE_VAL ? std::exp2(lses.get({s, row, 0, 0}) - top) / sum : 0;
        if (share > 0) want += share * outs.get({s, row, d, 0});
      }
      const double error =
          std::fabs(out.get({row, d, 0, 0}) - want) / (e.base * (1 + std::fabs(want)) + e.storage * std::fabs(want));
      worst = error <= worst ? worst : error;
    }
    CHECK(worst <= 1);
  }
  for (const tensor* x : {&out, &lse}) {
    x->each([&](const index4& i) { std::memset(x->place(i), canary_byte, tensor::size_of(x->type)); });
    CHECK(x->memory.holds_only(canary_byte));
  }
}

// The shares of states are rounded, and may add up to more than 1.
TEST_CASE("the largest number averages to itself, split and merged too") {
  for (const kernel_table* table : chosen.tables) {
    for (const char* dtype : dtype_names) {
      CAPTURE(table->isa);
      CAPTURE(std::string(dtype));
      test_case c(parse_problem(dtype + std::string(" b1 h16 q4 kv20000 d8")));
      const double largest = largest_of(c.p.dtype), infinite = HUGE_VAL;
      // Of one dim a key in the middle is infinite, of another two of either sign.
      c.v.each([&](const index4& i) {
        const bool middle = i[2] == 9000 || i[2] == 15000;
        c.v.set(i, middle && i[3] == 1   ? infinite
                   : middle && i[3] == 2 ? (i[2] == 9000 ? infinite : -infinite)
                                         : largest);
      });
      const plan plan = make_plan(c.p, *table, large_l2);
      REQUIRE(plan.chunks > 1);
      run(c, plan);
      c.out.each([&](const index4& i) {
        const double x = c.out.get(i);
        CHECK((i[3] == 1   ? x == infinite
               : i[3] == 2 ? std::isnan(x)
                           : std::fabs(x / largest - 1) < 1e-4 && x <= largest));
      });
    }
  }
}

TEST_CASE("merging follows the formula") {
  for (const kernel_table* table : chosen.tables)
    for (int32_t dtype = 0; dtype < 4; ++dtype)
      for (const int64_t states : {0, 1, 2, 3, 7})
        for (const int64_t v_dim : {1, 3, 16, 17, 64, 65, 200}) {
          check_merge(*table, dtype, false, states, v_dim);
          check_merge(*table, dtype, true, states, v_dim);
        }
}

template <class Number>
using element_of = std::conditional_t<sizeof(Number) == 2, uint16_t, Number>;  // as the library sees it
template <class Number>
const element_of<Number>* elements(const Number* numbers) {
  return reinterpret_cast<const element_of<Number>*>(numbers);
}
template <class Number>
element_of<Number>* elements(Number* numbers) {
  return reinterpret_cast<element_of<Number>*>(numbers);
}
template <class Number>
std::vector<Number> drawn(random_numbers& random, int64_t n, double size = 1) {
  std::vector<Number> v(static_cast<size_t>(n));
  for (Number& x : v) x = static_cast<Number>(size * random.normal());
  return v;
}

// A product of the layer, x and y in memory with room between rows and entries, against double; then the same rows in
// other company, whose bits must not differ.
template <class Number>
void check_linear(const kernel_table& table, int64_t batch, int64_t rows, int64_t in, int64_t out) {
  using element = element_of<Number>;
  CAPTURE(table.isa);
  CAPTURE(dtype_of<Number>);
  CAPTURE(batch);
  CAPTURE(rows);
  CAPTURE(in);
  CAPTURE(out);
  random_numbers random(static_cast<uint64_t>(rows * 1000003 + in * 1009 + out));
  const std::vector<Number> matrix = drawn<Number>(random, in * (out + 1)), bias = drawn<Number>(random, out);
  linear<element> packed(table, dtype_of<Number>, out, in);
  // Every second row of W is given with its elements apart.
  for (int64_t j = 0; j < out; ++j) {
    std::vector<Number> apart(static_cast<size_t>(3 * in));
    for (int64_t k = 0; k < in; ++k) apart[static_cast<size_t>(3 * k)] = matrix[static_cast<size_t>(j * in + k)];
    j % 2 == 0 ? packed.set_row(j, elements(&matrix[static_cast<size_t>(j * in)]), 1)
               : packed.set_row(j, elements(apart.data()), 3);
  }
  packed.set_bias(elements(bias.data()));
  packed.finish();

  const int64_t x_strides[2] = {rows * (in + 3) + 5, in + 3}, y_strides[2] = {rows * (out + 2) + 7, out + 2};
  const std::vector<Number> x = drawn<Number>(random, batch * x_strides[0]);
  const Number untouched = Number(-6e4);  // far from any result
  const auto run = [&](int64_t from, int64_t count, int32_t threads, bool gaps) {
    // Rows [from, from + count) of each entry. Without gaps the entries' y follow each other at one stride.
    std::vector<Number> y(static_cast<size_t>(batch * y_strides[0]), untouched);
    product<element> p = {&packed,
                          batch,
                          count,
                          elements(x.data() + from * x_strides[1]),
                          {x_strides[0], x_strides[1]},
                          elements(y.data() + from * y_strides[1]),
                          {y_strides[0], y_strides[1]}};
    std::vector<Number> dense;
    if (!gaps) {
      for (int64_t i = 0; i < batch * rows; ++i) {
        const Number* row = x.data() + i / rows * x_strides[0] + i % rows * x_strides[1];
        dense.insert(dense.end(), row, row + in);
      }
      p = {&packed, batch, rows, elements(dense.data()), {rows * in, in}, elements(y.data()), {rows * out, out}};
    }
    const mh_exec exec = exec_of(threads);
    multiplication(&p, 1, exec).run(exec, watched_call());
    return y;
  };

  const std::vector<Number> y = run(0, rows, 1, true);
  const double unit = 2 * rounding_of<real_of<Number>>;
  double worst = 0;
  for (int64_t i = 0; i < batch * rows; ++i) {
    const Number* from = x.data() + i / rows * x_strides[0] + i % rows * x_strides[1];
    for (int64_t j = 0; j < out; ++j) {
      double want = static_cast<double>(bias[static_cast<size_t>(j)]), size = std::fabs(want);
      for (int64_t k = 0; k < in; ++k) {
        const double term = static_cast<double>(from[k]) * static_cast<double>(matrix[static_cast<size_t>(j * in + k)]);
        want += term;
        size += std::fabs(term);
      }
      const Number got = y[static_cast<size_t>(i / rows * y_strides[0] + i % rows * y_strides[1] + j)];
      // Errors of rounding are random: they grow with the root of the number of additions. 16-bit results are rounded once.
      const double rounded = sizeof(Number) == 2 ? rounding_of<Number> * 1.001 * std::fabs(want) : 0;
      const double error = std::fabs(static_cast<double>(got) - want) /
                           (2 * unit * size * (1 + std::sqrt(static_cast<double>(in)) / 16) + rounded);
      worst = error <= worst ? worst : error;
    }
  }
  CHECK(worst <= 1);
  size_t written = 0;
  for (const Number value : y) written += value != untouched;
  CHECK(written == static_cast<size_t>(batch * rows * out));

  CHECK(run(0, rows, 3, true) == y);
  const std::vector<Number> dense = run(0, rows, 2, false);
  bool same = true;
  for (int64_t i = 0; i < batch * rows; ++i) {
    const Number* row = y.data() + i / rows * y_strides[0] + i % rows * y_strides[1];
    same = same && std::memcmp(row, dense.data() + i * out, static_cast<size_t>(out) * sizeof(Number)) == 0;
  }
  CHECK(same);
  for (const int64_t count : {int64_t{1}, int64_t{2}, int64_t{7}, int64_t{64}, int64_t{65}}) {
    if (count >= rows || packed.on_unit(count) != packed.on_unit(rows)) continue;
    const int64_t from = rows - count;
    const std::vector<Number> part = run(from, count, 1, true);
    for (int64_t b = 0; b < batch; ++b) {
      const size_t at = static_cast<size_t>(b * y_strides[0] + from * y_strides[1]);
      CHECK(std::memcmp(&part[at], &y[at], static_cast<size_t>((count - 1) * y_strides[1] + out) * sizeof(Number)) ==
            0);
    }
  }
}

TEST_CASE("projections") {
  struct {
    int64_t batch, rows, in, out;
  } constexpr shapes[] = {
      {1, 1, 1, 1},
      {2, 3, 5, 2},
      {3, 7, 17, 33},
      {1, 8, 128, 48},
      {2, 13, 200, 50},
      {1, 26, 130, 97},
      {1, 2, 1700, 49},
      {2, 5, 800, 17},
      {1, 200, 40, 100},
      {3, 67, 30, 24},
      {1, 400, 10, 70},
      // with a matrix unit there
      {1, 100, 129, 140},
      {2, 67, 300, 193},
      {3, 64, 128, 128},
      {3, 48, 130, 150},
      {1, 70, 1100, 130},
      {1, 260, 140, 400},
      {1, 50, 2100, 128},
      {1, 1, 128, 128},
      {5, 1, 200, 130},
      {3, 5, 161, 144},
      {2, 17, 300, 131},
      {1, 33, 140, 390},
      {1, 16, 129, 128},
      {1, 128, 160, 160},
      {1, 129, 256, 192},
      {1, 5, 384, 128},
      {1, 40, 385, 129},
  };
  for (const kernel_table* table : chosen.tables) {
    for (const auto& s : shapes) {
      check_linear<float>(*table, s.batch, s.rows, s.in, s.out);
      check_linear<double>(*table, s.batch, s.rows, s.in, s.out);
      check_linear<bf16>(*table, s.batch, s.rows, s.in, s.out);
      check_linear<f16>(*table, s.batch, s.rows, s.in, s.out);
    }
  }
}

// Beside numbers that a matrix unit multiplies, others in some rows of x, or in W. Those rows, or all, have the bits that
// they have without it; the others keep theirs.
template <class Number>
void check_unusual_numbers(const kernel_table& table) {
  constexpr int64_t rows = 70, in = 1100, out = 400;
  constexpr bool any_size = std::is_same_v<Number, f16>;  // any but infinities and NaN are for the unit
  using element = element_of<Number>;
  CAPTURE(table.isa);
  CAPTURE(dtype_of<Number>);
  const linear_unit_kernels& unit = table.dtype[dtype_of<Number>].linear_unit;
  if (unit.run == nullptr) return;
  random_numbers random(7);
  std::vector<Number> matrix = drawn<Number>(random, in * out), x = drawn<Number>(random, rows * in);
  const auto pack = [&] {
    linear<element> packed(table, dtype_of<Number>, out, in);
    for (int64_t j = 0; j < out; ++j) packed.set_row(j, elements(&matrix[static_cast<size_t>(j * in)]), 1);
    packed.finish();
    return packed;
  };
  const auto multiplied = [&](const linear<element>& w, int64_t first, int64_t count) {
    std::vector<Number> y(static_cast<size_t>(count * out));
    const product<element> p = {
        &w, 1, count, elements(x.data() + first * in), {count * in, in}, elements(y.data()), {count * out, out}};
    const mh_exec exec = exec_of(2);
    multiplication(&p, 1, exec).run(exec, watched_call());
    return y;
  };
  const auto is_row = [&](const std::vector<Number>& all, int64_t row, const std::vector<Number>& other, int64_t at) {
    return std::memcmp(&all[static_cast<size_t>(row * out)], &other[static_cast<size_t>(at * out)],
                       out * sizeof(Number)) == 0;
  };
  const linear<element> usual = pack();
  REQUIRE(usual.on_unit(rows));
  REQUIRE(!usual.on_unit(unit.least_rows - 1));
  const std::vector<Number> before = multiplied(usual, 0, rows);
  const std::vector<Number> one_by_one = [&] {
    std::vector<Number> y;
    for (int64_t row = 0; row < rows; ++row) {
      const std::vector<Number> one = multiplied(usual, row, 1);
      y.insert(y.end(), one.begin(), one.end());
    }
    return y;
  }();
  CHECK((before == one_by_one) == (unit.least_rows == 1));  // other bits where the unit is not used
  const struct {
    int64_t row;
    double value;
    bool all;  // of the row
  } others[] = {{3, any_size ? HUGE_VAL : 1e30, false},
                {32, HUGE_VAL, false},
                {33, -HUGE_VAL, false},
                {40, NAN, false},
                {69, any_size ? NAN : 1e-30, true}};
  for (const auto& other : others) {
    Number* const row = &x[static_cast<size_t>(other.row * in)];
    const int64_t at = other.row % 2 == 0 ? in - 2 : in - 1;  // of a pair the first or the second
    std::fill(row + (other.all ? 0 : at), row + (other.all ? in : at + 1), static_cast<Number>(other.value));
  }
  std::fill_n(&x[static_cast<size_t>(50 * in)], in, static_cast<Number>(0.0));
  std::fill_n(&x[static_cast<size_t>(51 * in)], in, static_cast<Number>(-0.0));
  const std::vector<Number> y = multiplied(usual, 0, rows);
  for (int64_t row = 0; row < rows; ++row) {
    CAPTURE(row);
    if (row == 50 || row == 51) {
      for (int64_t j = 0; j < out; ++j) CHECK(static_cast<double>(y[static_cast<size_t>(row * out + j)]) == 0);
    } else if (std::any_of(std::begin(others), std::end(others), [&](const auto& o) { return o.row == row; })) {
      CHECK(is_row(y, row, multiplied(usual, row, 1), 0));
    } else {
      CHECK(is_row(y, row, before, row));
    }
  }
  for (const double value : {any_size ? -HUGE_VAL : 1e30, HUGE_VAL, std::nan("")}) {
    matrix[static_cast<size_t>(out / 2 * in)] = static_cast<Number>(value);
    const linear<element> unusual = pack();
    CHECK(!unusual.on_unit(rows));
    const std::vector<Number> without = multiplied(unusual, 0, 3);
    bool close = true;
    for (int64_t i = 0; i < 3 * out; ++i) {
      const double got = static_cast<double>(without[static_cast<size_t>(i)]),
                   want = static_cast<double>(before[static_cast<size_t>(i)]);
      close =
          close && (i % out == out / 2 || std::fabs(got - want) <= 3 * rounding_of<Number> * std::fabs(want) + 1e-3);
    }
    CHECK(close);
  }
  std::fill(matrix.begin(), matrix.end(), static_cast<Number>(0.0));
  CHECK(pack().on_unit(rows));
  std::fill(matrix.begin(), matrix.end(), static_cast<Number>(-0.0));
  CHECK(pack().on_unit(rows));
  matrix.back() = static_cast<Number>(1e-30);  // the only number of its row; 0 in f16
  CHECK(pack().on_unit(rows) == any_size);
  matrix.back() = static_cast<Number>(any_size ? 65504.0 : 1e15);  // the largest of f16
  CHECK(pack().on_unit(rows));
}

// Left rows one after the other, more than are widened at a time, in few and in many columns, and the tiniest numbers, huge
// ones, infinities and NaN: results are those of double, wherever they come from.
template <class Number>
void check_left_rows(const kernel_table& table, int64_t in, double tiny) {
  constexpr int64_t rows = 100, out = 130;
  using element = element_of<Number>;
  CAPTURE(table.isa);
  CAPTURE(dtype_of<Number>);
  CAPTURE(in);
  CAPTURE(tiny);
  random_numbers random(9);
  const std::vector<Number> matrix = drawn<Number>(random, in * out);
  std::vector<Number> x = drawn<Number>(random, rows * in);
  for (int64_t row = 3; row < rows; ++row) {
    if (row >= 89 && row < rows - 1) continue;
    for (int64_t k = 0; k < in; ++k) {
      Number& some = x[static_cast<size_t>(row * in + k)];
      some = static_cast<Number>(static_cast<double>(some) * tiny);
    }
  }
  const double others[] = {HUGE_VAL, NAN, -HUGE_VAL, 1e30};
  for (int64_t i = 0; i < 4; ++i) x[static_cast<size_t>((91 + 2 * i) * in + i)] = static_cast<Number>(others[i]);
  const std::vector<Number> bias = drawn<Number>(random, out, tiny);
  linear<element> packed(table, dtype_of<Number>, out, in);
  for (int64_t j = 0; j < out; ++j) packed.set_row(j, elements(&matrix[static_cast<size_t>(j * in)]), 1);
  packed.set_bias(elements(bias.data()));
  packed.finish();
  std::vector<Number> y(static_cast<size_t>(rows * out));
  const product<element> p = {&packed,          1, rows, elements(x.data()), {rows * in, in}, elements(y.data()),
                              {rows * out, out}};
  const mh_exec exec = exec_of(1);
  multiplication(&p, 1, exec).run(exec, watched_call());
  constexpr double least = std::is_same_v<Number, f16> ? 0x1p-25 : std::is_same_v<Number, bf16> ? 0x1p-134 : 0x1p-150;
  bool good = true;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = 0; j < out; ++j) {
      double want = static_cast<double>(bias[static_cast<size_t>(j)]), size = std::fabs(want);
      for (int64_t k = 0; k < in; ++k) {
        const double term = static_cast<double>(x[static_cast<size_t>(row * in + k)]) *
                            static_cast<double>(matrix[static_cast<size_t>(j * in + k)]);
        want += term;
        size += std::fabs(term);
      }
      const double got = static_cast<double>(y[static_cast<size_t>(row * out + j)]);
      // Half the smallest denormal number of the type is as near as it may come.
      const double bound = 3e-6 * size + 1.001 * rounding_of<Number> * std::fabs(want) + least;
      good = good && (std::isfinite(want) ? std::fabs(got - want) <= bound
                      : std::isnan(want)  ? std::isnan(got)
                                          : got == want);
    }
  }
  CHECK(good);
}

TEST_CASE("projections of rows that the matrix unit leaves") {
  for (const kernel_table* table : chosen.tables) {
    for (const int64_t in : {129, 700}) {
      for (const double tiny : {1e-25, 1e-38}) {
        check_left_rows<float>(*table, in, tiny);
        check_left_rows<bf16>(*table, in, tiny);
      }
      check_left_rows<f16>(*table, in, 1e-6);
    }
  }
}

TEST_CASE("projections of numbers that are not for the matrix unit") {
  for (const kernel_table* table : chosen.tables) {
    check_unusual_numbers<float>(*table);
    check_unusual_numbers<bf16>(*table);
    check_unusual_numbers<f16>(*table);
  }
}

TEST_CASE("a table says what it is") {
  for (const isa_row& row : isa_rows) {
    if (!row.runs) continue;
    const kernel_table& table = row.table;
    CHECK(std::string(table.isa) == row.name);
    CHECK(table.panel_rows[0] % table.lanes == 0);
    CHECK(table.panel_rows[1] % (table.lanes / 2) == 0);
    CHECK(table.linear_width[0] % table.lanes == 0);
    CHECK(table.linear_width[1] % (table.lanes / 2) == 0);
  }
}

// 0 = go on, else the exit status.
int choose(int argc, char** argv) {
  const char* environment = std::getenv("MH_TEST_ISA");
  std::string isa = environment != nullptr ? environment : "";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("--isa=")) isa = argument.substr(6);
    if (argument.starts_with("--line=")) chosen.line = argument.substr(7);
    if (argument == "--brief") chosen.brief = true;
    if (argument == "--verbose") chosen.verbose = true;
  }
  bool known = false;
  for (const isa_row& row : isa_rows) {
    if (!isa.empty() && isa != row.name) continue;
    known = true;
    if (row.runs) chosen.tables.push_back(&row.table);
  }
  if (!known) std::fprintf(stderr, "kernel_test: this build has no ISA \"%s\"\n", isa.c_str());
  if (known && chosen.tables.empty()) std::printf("skipped: this CPU lacks %s\n", isa.c_str());
  return !known ? 2 : chosen.tables.empty() ? 77 : 0;
}

}  // namespace
}  // namespace manyhead::test

int main(int argc, char** argv) {
  const int status = manyhead::test::choose(argc, argv);
  return status != 0 ? status : doctest::Context(argc, argv).run();
}
