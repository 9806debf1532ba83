// What is seen of calls: profiles and traces, lines that stand for problems, probes. The log of MH_VERBOSE and the file of
// MH_PROFILE, which a process has once, are tested from Python (python/tests/test_profiling.py).
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "error.hpp"
#include "exec_of.hpp"
#include "json.hpp"
#include "machine.hpp"
#include "mha.hpp"
#include "plan.hpp"
#include "probe.hpp"
#include "profile.hpp"
#include "registry.hpp"
#include "scheduler.hpp"
#include "test_case.hpp"

namespace manyhead::test {
namespace {

constexpr int64_t l2 = 1 << 20;

mh_profile_options options_of(int64_t calls, int64_t tasks) { return {sizeof(mh_profile_options), calls, tasks, 0, 0}; }

// The number behind the first "key": at or after `from`.
double number_of(const std::string& text, const std::string& key, size_t from = 0) {
  const size_t at = text.find("\"" + key + "\": ", from);
  REQUIRE_MESSAGE(at != text.npos, key);
  return std::strtod(text.c_str() + at + key.size() + 4, nullptr);
}

// The numbers behind each "key": at or after `from`.
std::vector<double> numbers_of(const std::string& text, const std::string& key, size_t from = 0) {
  std::vector<double> all;
  for (size_t at = text.find("\"" + key + "\": ", from); at != text.npos; at = text.find("\"" + key + "\": ", at + 1))
    all.push_back(number_of(text, key, at));
  return all;
}

double sum_of(const std::string& text, const std::string& key, size_t from = 0) {
  const std::vector<double> all = numbers_of(text, key, from);
  return std::accumulate(all.begin(), all.end(), 0.0);
}

int64_t count_of(const std::string& text, const std::string& what) {
  int64_t count = 0;
  for (size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++count;
  return count;
}

struct profiled {
  std::string summary, trace;
};

template <class Work>
profiled profile_of(Work work, mh_profile_options options = options_of(0, 0)) {
  begin_profile(options);
  work();
  end_profile();
  return {profile_text(MH_PROFILE_SUMMARY), profile_text(MH_PROFILE_TRACE)};
}

std::map<std::string, double> phases_of(const std::string& summary) {
  std::map<std::string, double> phases;
  const size_t calls = summary.find("\"calls\": [");
  for (const char* name :
       {"pack", "scores", "mask", "softmax", "values", "store", "merge", "weights", "project", "idle"})
    phases[name] = number_of(summary, name, calls);
  return phases;
}

// --- profiles -----------------------------------------------------------------------------------------------------------

TEST_CASE("a profile names each phase of each route") {
  // Each phase takes longer than a tick of a slow clock: AArch64 has some of 40 ns.
  const struct {
    const char* line;
    const char* route;
    std::vector<std::string> phases;
  } cases[] = {
      {"f32 b1 h4 q200 kv300 d64", nullptr, {"pack", "scores", "softmax", "values", "store"}},
      {"f32 b1 h4 q200 kv200 d64 causal", nullptr, {"pack", "scores", "mask", "softmax", "values", "store"}},
      {"f64 b1 h4 q200 kv200 d64 softcap=20", "tile", {"pack", "scores", "mask", "softmax", "values", "store"}},
      {"f32 b1 h4 q200 kv200 d64 weights", "tile", {"pack", "scores", "softmax", "values", "store", "weights"}},
      {"f32 b1 h4 q2 kv9000 d64 v1024", "decode", {"pack", "scores", "softmax", "values", "store", "merge"}},
      {"bf16 b1 h4 q2 kv300 d64 v1024 keymask", "decode", {"pack", "scores", "mask", "softmax", "values", "store"}},
      {"bf16 b1 h4 q256 kv256 d64", nullptr, {"pack", "scores", "softmax", "values", "store"}},
      {"f32 b1 h4 q200 kv300 d40", "tile", {"pack", "scores", "softmax", "values", "store"}},
      {"f32 b1 h4 q200 kv200 d40 causal", "tile", {"pack", "scores", "mask", "softmax", "values", "store"}}};
  for (const auto& wanted : cases) {
    CAPTURE(wanted.line);
    test_case c(parse_problem(wanted.line));
    const plan plan = make_plan(c.p, current_isa(), l2);
    for (const int32_t threads : {1, 3}) {
      const profiled seen = profile_of([&] { run(plan, c.t, exec_of(threads)); });
      CAPTURE(seen.summary);
      REQUIRE(is_json(seen.summary));
      REQUIRE(is_json(seen.trace));
      CHECK(seen.summary.find("\"problem\": \"" + std::string(wanted.line)) != std::string::npos);
      if (wanted.route != nullptr)
        CHECK(seen.summary.find("\"route\": \"" + std::string(wanted.route)) != std::string::npos);
      const size_t call = seen.summary.find("\"calls\": [");
      double total = 0;
      for (const auto& [name, seconds] : phases_of(seen.summary)) {
        CAPTURE(name);
        const bool expected = std::find(wanted.phases.begin(), wanted.phases.end(), name) != wanted.phases.end();
        if (name != "idle") CHECK((seconds > 0) == expected);
        total += seconds;
      }
      // Each thread was doing something or idle at each moment.
      const double wall = number_of(seen.summary, "threads", call) * number_of(seen.summary, "seconds", call);
      CHECK(total == doctest::Approx(wall).epsilon(0.05));
      CHECK(number_of(seen.summary, "flops", call) == plan.flops);
      // A slice of the trace for the call, and some for its tasks, each in one.
      CHECK(count_of(seen.trace, "\"cat\": \"call\"") == 1);
      CHECK(count_of(seen.trace, "\"cat\": \"task\"") > 0);
      CHECK(sum_of(seen.trace, "tasks", seen.trace.find("traceEvents")) == number_of(seen.summary, "tasks", call));
      CHECK(count_of(seen.trace, "\"cat\": \"phase\"") > 0);
    }
  }
}

// Waiting between the stages of a call is nobody's work: before, the layer's attention counted as projection too.
TEST_CASE("the layer's phases add up to its time") {
  constexpr int64_t tokens = 600, width = 64;
  std::vector<float> weights(width * width, 0.01F), x(tokens * width, 0.1F), out(tokens * width);
  mh_mha_weights w = {};
  w.struct_size = sizeof w;
  w.embed_dim = width;
  w.heads = 4;
  w.w_q = w.w_k = w.w_v = w.w_o = weights.data();
  const auto layer = make_mha(w);
  mh_mha_call c = {};
  c.struct_size = sizeof c;
  c.batch = 1;
  c.q_len = c.kv_len = tokens;
  c.x_q = x.data();
  c.out = out.data();
  const profiled seen = profile_of([&] { layer->run(c, exec_of(2)); });
  CAPTURE(seen.summary);
  const size_t call = seen.summary.find("\"kind\": \"layer\"");
  REQUIRE(call != std::string::npos);
  CHECK(count_of(seen.summary, "\"kind\"") == 2);  // its attention too
  double total = 0;
  for (const auto& [name, seconds] : phases_of(seen.summary)) {
    total += seconds;
    if (name == "project" || name == "scores" || name == "values") CHECK(seconds > 0);
  }
  const double wall = number_of(seen.summary, "threads", call) * number_of(seen.summary, "seconds", call);
  CHECK(total == doctest::Approx(wall).epsilon(0.02));
  CHECK(phases_of(seen.summary)["project"] < 0.9 * wall);
}

TEST_CASE("more threads than there is room for") {
  test_case c(parse_problem("f32 b1 h1 q1 kv4 d4"));
  const plan plan = make_plan(c.p, current_isa(), l2);
  const profiled seen = profile_of([&] {
    for (int i = 0; i < 1100; ++i) std::jthread([&] { run(plan, c.t, exec_of(1)); });
  });
  CHECK(is_json(seen.summary));
  CHECK(number_of(seen.summary, "calls_dropped") == 1100 - 1024);
  CHECK(count_of(seen.summary, "\"kind\"") == 1024);
}

TEST_CASE("each call may be of another problem") {
  const profiled seen = profile_of(
      [&] {
        for (int i = 1; i <= 60; ++i) {
          test_case c(parse_problem("f32 b1 h1 q1 kv" + std::to_string(i) + " d4"));
          run(make_plan(c.p, current_isa(), l2), c.t, exec_of(1));
        }
      },
      options_of(60, 0));
  CHECK(number_of(seen.summary, "calls_dropped") == 0);
  CHECK(count_of(seen.summary, "\"kind\"") == 60);
  CHECK(seen.summary.find("\"problem\": \"f32 b1 h1 q1 kv60 d4\"") != std::string::npos);
}

TEST_CASE("a profile changes no bit") {
  for (const char* line :
       {"f32 b2 h4/2 q70 kv90 d40 causal align=br lse", "bf16 b1 h8/2 q3 kv700 d64", "bf16 b1 h2 q100 kv100 d64"}) {
    CAPTURE(line);
    test_case plain(parse_problem(line)), watched(parse_problem(line));
    const plan plan = make_plan(plain.p, current_isa(), l2);
    run(plan, plain.t, exec_of(2));
    profile_of([&] { run(plan, watched.t, exec_of(2)); });
    const auto a = plain.out.memory.bytes(), b = watched.out.memory.bytes();
    CHECK(std::equal(a.begin(), a.end(), b.begin(), b.end()));
  }
}

TEST_CASE("a slice of a trace names the batch entry and kv head of its first task") {
  test_case c(parse_problem("f32 b64 h4/2 q1 kv700 d64"));
  const plan plan = make_plan(c.p, current_isa(), l2);
  REQUIRE(plan.entries == 1);  // to kernels
  const profiled seen = profile_of([&] { run(plan, c.t, exec_of(1)); });
  const std::vector<double> batches = numbers_of(seen.trace, "batch"), heads = numbers_of(seen.trace, "kv_head");
  REQUIRE(!batches.empty());
  REQUIRE(!heads.empty());
  CHECK(*std::ranges::max_element(batches) > 1);
  CHECK(*std::ranges::max_element(batches) < 64);
  CHECK(*std::ranges::max_element(heads) < 2);
}

TEST_CASE("what does not fit is counted") {
  test_case c(parse_problem("f32 b4 h8 q64 kv64 d64"));
  const plan plan = make_plan(c.p, current_isa(), l2);
  const profiled seen = profile_of(
      [&] {
        for (int i = 0; i < 5; ++i) run(plan, c.t, exec_of(2));
      },
      options_of(3, 10));
  CHECK(number_of(seen.summary, "calls_dropped") == 2);
  CHECK(count_of(seen.summary, "\"kind\"") == 3);
  CHECK(number_of(seen.summary, "tasks_dropped") > 0);
  CHECK(count_of(seen.trace, "\"cat\": \"task\"") == 10);
  CHECK(phases_of(seen.summary)["scores"] > 0);  // of calls all tasks count, kept or not
}

TEST_CASE("of many short calls some stand for all") {
  constexpr int short_calls = 10000, long_calls = 3;
  test_case brief(parse_problem("f32 b1 h2 q4 kv10 d16")), large(parse_problem("f32 b1 h16 q256 kv256 d64"));
  const plan brief_plan = make_plan(brief.p, current_isa(), l2), large_plan = make_plan(large.p, current_isa(), l2);
  const profiled seen = profile_of([&] {
    for (int i = 0; i < short_calls; ++i) run(brief_plan, brief.t, exec_of(1));
    for (int i = 0; i < long_calls; ++i) run(large_plan, large.t, exec_of(1));
  });
  const int64_t kept = count_of(seen.summary, "\"kind\"");
  CHECK(kept < short_calls / 10);
  CHECK(static_cast<double>(kept) + number_of(seen.summary, "calls_skipped") == short_calls + long_calls);
  // By chance, so nearly: some twenty were kept, each for some 450.
  const double calls = sum_of(seen.summary, "stands_for");
  CHECK(calls > short_calls / 3);
  CHECK(calls < short_calls * 3);
  // A thread's phases are those of all its calls.
  CHECK(number_of(seen.summary, "tasks") > short_calls / 3);
  // The first calls are kept, and so is what is long, and whatever is kept has phases.
  CHECK(count_of(seen.summary, "\"stands_for\": 1,") >= 64 + long_calls);
  CHECK(count_of(seen.summary, "\"problem\": \"f32 b1 h16 q256 kv256 d64\"") == long_calls);
  const size_t first_large = seen.summary.find("\"problem\": \"f32 b1 h16");
  CHECK(count_of(seen.summary.substr(0, first_large), "\"phases\": null") == 0);
}

// Each thread counts on its own, without telling the session.
TEST_CASE("calls that are skipped on many threads are counted") {
  constexpr int threads = 4, calls_each = 500;
  const std::string line = "f32 b1 h2 q4 kv10 d16";
  const plan plan = make_plan(test_case(parse_problem(line), false).p, current_isa(), l2);
  for (int again = 0; again < 2; ++again) {
    const profiled seen = profile_of([&] {
      std::vector<std::jthread> others;
      for (int i = 0; i < threads; ++i) {
        others.emplace_back([&] {
          test_case c(parse_problem(line));
          for (int call = 0; call < calls_each; ++call) run(plan, c.t, exec_of(1));
        });
      }
    });
    const double kept = static_cast<double>(count_of(seen.summary, "\"kind\""));
    CHECK(kept >= 64 * threads);
    CHECK(kept + number_of(seen.summary, "calls_skipped") == threads * calls_each);
  }
}

// What a layer does is kept where the layer is.
TEST_CASE("a call inside another is kept with it or not at all") {
  const profiled seen = profile_of([] {
    test_case c(parse_problem("f32 b1 h2 q4 kv10 d16"));
    const plan plan = make_plan(c.p, current_isa(), l2);
    for (int i = 0; i < 2000; ++i) {
      const watched_call outer(1, 1.0, [](char* text, size_t size) { std::snprintf(text, size, "outer"); });
      run(plan, c.t, exec_of(1), &outer);
    }
  });
  CHECK(count_of(seen.summary, "\"kind\": \"outer\"") == count_of(seen.summary, "\"kind\": \"attention\""));
  CHECK(number_of(seen.summary, "calls_skipped") > 2000);
  const double kept = static_cast<double>(count_of(seen.summary, "\"kind\""));
  CHECK(kept + number_of(seen.summary, "calls_skipped") == 4000);
}

TEST_CASE("one profile at a time, ended before it is read") {
  CHECK_THROWS_AS(end_profile(), error);
  begin_profile(options_of(0, 0));
  CHECK_THROWS_AS(begin_profile(options_of(0, 0)), error);
  CHECK_THROWS_AS(profile_text(MH_PROFILE_SUMMARY), error);
  end_profile();
  CHECK_THROWS_AS(end_profile(), error);
  CHECK(is_json(profile_text(MH_PROFILE_SUMMARY)));
  CHECK(is_json(profile_text(MH_PROFILE_TRACE)));
  CHECK_THROWS_AS(profile_text(2), error);
  CHECK_THROWS_AS(begin_profile(options_of(-1, 0)), error);
  CHECK_THROWS_AS(begin_profile(options_of(0, -1)), error);
  CHECK_THROWS_AS(begin_profile({sizeof(mh_profile_options), 0, 0, 2, 0}), error);
}

TEST_CASE("profiles begin and end while other threads compute") {
  const std::string line = "f32 b1 h4 q60 kv60 d32 causal";
  const plan plan = make_plan(test_case(parse_problem(line), false).p, current_isa(), l2);
  std::atomic<bool> stop{false};
  std::vector<std::jthread> others;
  for (int i = 0; i < 3; ++i) {
    others.emplace_back([&] {
      test_case c(parse_problem(line));
      while (!stop.load()) run(plan, c.t, exec_of(2));
    });
  }
  for (int i = 0; i < 30; ++i) {
    const profiled seen = profile_of([] { std::this_thread::yield(); }, options_of(20, 50));
    CHECK(is_json(seen.summary));
    CHECK(is_json(seen.trace));
  }
  stop.store(true);
}

TEST_CASE("counters are numbers, or a sentence says why not") {
  test_case c(parse_problem("f32 b1 h4 q200 kv200 d64"));
  const plan plan = make_plan(c.p, current_isa(), l2);
  const profiled seen =
      profile_of([&] { run(plan, c.t, exec_of(1)); }, {sizeof(mh_profile_options), 0, 0, MH_PROFILE_COUNTERS, 0});
  CAPTURE(seen.summary);
  CHECK(is_json(seen.summary));
  if (seen.summary.find("\"counters_note\": null") != std::string::npos) {
    CHECK(number_of(seen.summary, "instructions") > plan.flops / 64);
  } else {
    CHECK(seen.summary.find("\"counters_note\": \"the kernel gives out no hardware counters: ") != std::string::npos);
    CHECK(seen.summary.find("\"cycles\": null") != std::string::npos);
  }
}

// --- lines ------------------------------------------------------------------------------------------------------------

TEST_CASE("a line that is no problem names the word at fault") {
  const struct {
    const char* line;
    size_t column;
    const char* says;
  } cases[] = {{"", 0, "the line is empty"},
               {"   \t", 0, "the line is empty"},
               {"f33 b1 h1 q1 kv1 d1", 0, "\"f33\" is not a dtype"},
               {"b1 h1 q1 kv1 d1", 0, "\"b1\" is not a dtype"},
               {"f32 b1 h8 q10 kv10 d64 casual", 23, "\"casual\" is not a word of a problem"},
               {"  f32   b1 hx q10 kv10 d64", 11, "\"hx\" is not a word of a problem"},
               {"f32 b1 h8/ q10 kv10 d64", 7, "must be h<number>/<number>"},
               {"f32 b1 h8 q1x kv10 d64", 10, "must be q<number>"},
               {"f32 b1 h8 q99999999999999999999 kv10 d64", 10, "must be q<number>"},
               {"f32 b1 h8 q10 kv10", 18, "d<number> is missing"},
               {"f32 b1 b2 h8 q10 kv10 d64", 7, "is the second of its kind"},
               {"f32 b1 h8 q10 kv10 d64 align=up", 23, "must be align=tl"},
               {"f32 b1 h8 q10 kv10 d64 window=3", 23, "must be window=<number>,<number>"},
               {"f32 b1 h8 q10 kv10 d64 softcap=", 23, "does not end with a number"},
               {"f32 b1 h8 q10 kv10 d64 bias=f8", 23, "does not end with a dtype"},
               {"f32 b1 h8 q10 kv10 d64 scores=all", 23, "must be scores=raw"},
               {"f32 b1 h8 q10 kv10 d64 alibi=no", 23, "must be alibi"},
               {"f32 b1 h8 q10 kv10 d64 what=1", 23, "is not a word of a problem"},
               {"f32 b1 h8/0 q10 kv10 d64", 7, "must be h<number>/<number>"},
               {"f32 b1 h8 q10 kv10 d64 v0", 23, "must be at least v1"},
               {"f32 b1 h8 q10 kv10 d64 window=1,1 window=0,0", 34, "is the second of its kind"},
               {"f32 b1 h8 q10 kv10 d64 lse lse2", 27, "is the second of its kind"},
               {"f32 b1 h8 q10 kv10 d64 alibi alibi=signed", 29, "is the second of its kind"},
               {"f32 b1 h8 q10 kv10 d64 offsets align=tl", 39, "exclude each other"},
               {"f32 b1 h8 q10 kv10 d64 slopes=bh", 32, "alibi is not"},
               {"f32 b1 h8 q10 kv10 d64 i64", 26, "neither lens nor offsets"},
               {"f32 b1 h8 q10 kv10 d64 extra=-1", 23, "must be at least extra=0"}};
  for (const auto& wrong : cases) {
    CAPTURE(wrong.line);
    try {
      manyhead::parse_problem(wrong.line);
      FAIL("was read");
    } catch (const line_error& e) {
      CHECK(e.column() == wrong.column);
      CAPTURE(e.what());
      CHECK(std::strstr(e.what(), wrong.says) != nullptr);
      CHECK(std::strstr(e.what(), ("(column " + std::to_string(wrong.column + 1) + ")").c_str()) != nullptr);
    }
  }
}

// --- probes -----------------------------------------------------------------------------------------------------------

TEST_CASE("probes count") {
  // Only what can be said of any machine, busy or emulated: something is done, and a second thread's work counts too.
  for (int32_t isa = 0; isa < isa_count(); ++isa) {
    if (!isa_supported(isa)) continue;
    const kernel_table& table = *isa_table(isa);
    CAPTURE(table.isa);
    for (int32_t dtype = 0; dtype < dtype_count; ++dtype) {
      CHECK(table.dtype[dtype].flops_of_turn > 0);
      CHECK(arithmetic_rate(table, dtype, 1, 1e-4) > 1e6);
    }
    CHECK(read_rate(table, 100, 1, 1e-4) > 1e5);
    CHECK(read_rate(table, 1 << 20, 3, 1e-3) > 1e5);
    std::vector<uint64_t> words(64 * 3, 0);
    words[100] = 5;
    CHECK(table.read(words.data(), 64 * 3 * 8) == 5);  // all is read
    CHECK(table.read(words.data(), 64 * 8) == 0);
  }
  CHECK(clock_rate(1e-3) > 1e6);
}

}  // namespace
}  // namespace manyhead::test
