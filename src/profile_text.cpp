// A profile as text (profile_records.hpp: text_of).
#include <cstring>
#include <vector>

#include "json.hpp"
#include "problem_line.hpp"
#include "profile_records.hpp"
#include "version.hpp"

namespace manyhead {
namespace {

const char* const phase_names[phase_count] = {"pack",  "scores", "mask",    "softmax", "values",
                                              "store", "merge",  "weights", "project"};

// What workers did, added up.
struct work {
  int64_t tasks = 0;
  uint64_t kernels = 0;  // in tasks whose phases kernels name; of some of them:
  uint64_t detailed[phase_count] = {};
  uint64_t whole[phase_count] = {};  // in tasks that are one phase

  void add(const worker_record& w, uint64_t times = 1) {
    tasks += w.tasks * static_cast<int64_t>(times);
    (w.what == phase_count ? kernels : whole[w.what]) += w.busy * times;
    for (int i = 0; i < phase_count; ++i) detailed[i] += w.detailed[i] * times;
  }
  void add(const work& w) {
    tasks += w.tasks;
    kernels += w.kernels;
    for (int i = 0; i < phase_count; ++i) {
      detailed[i] += w.detailed[i];
      whole[i] += w.whole[i];
    }
  }

  // Of kernels that were not looked into, the time goes as in those that were. False: none was.
  bool phases(double (&seconds)[phase_count], double per_tick) const {
    double known = 0;
    for (const uint64_t ticks : detailed) known += static_cast<double>(ticks);
    if (known == 0 && kernels > 0) return false;
    const double scale = known > 0 ? static_cast<double>(kernels) / known : 0.0;
    for (int i = 0; i < phase_count; ++i)
      seconds[i] = (static_cast<double>(whole[i]) + static_cast<double>(detailed[i]) * scale) * per_tick;
    return true;
  }
};

// Phases, and what is left of `available` seconds as idle, where that is not negative. Or null, where nothing is known.
void add_phases(json& out, const work* w, double per_tick, double available) {
  double seconds[phase_count];
  out.key("phases");
  if (w == nullptr || !w->phases(seconds, per_tick)) {
    out.raw("null");
    return;
  }
  out.raw("{");
  for (int i = 0; i < phase_count; ++i) {
    out.key(phase_names[i]).value(seconds[i]);
    available -= seconds[i];
  }
  out.key("idle").value(std::max(0.0, available)).raw("}");
}

std::string title_of(const profile_session& s, const call_record& call) {
  return call.problem >= 0 ? to_text(s.problems[call.problem].p).text : call.what;
}

void add_call(json& out, const profile_session& s, const call_record& call, const work& w, double per_tick) {
  out.item().raw("{");
  out.key("kind").value(call.problem >= 0 ? "attention" : std::string(call.what, std::strcspn(call.what, " ")).c_str());
  out.key("problem").value(title_of(s, call).c_str());
  if (call.problem >= 0) {
    const problem_record& p = s.problems[call.problem];
    out.key("isa").value(p.table->isa).key("route").value(route_names[p.kernel]);
    out.key("flops").value(p.flops).key("bytes").value(p.bytes);
  }
  out.key("thread").value(s.thread_at(call.thread).id).key("threads").value(call.threads);
  out.key("start").value(call.start).key("seconds").value(call.seconds);
  out.key("stands_for").value(call.stands_for);
  const bool whole = !call.missing.load();
  out.key("tasks");
  whole ? out.value(w.tasks) : out.raw("null");
  add_phases(out, whole ? &w : nullptr, per_tick, static_cast<double>(call.threads) * call.seconds);
  out.raw("}");
}

void add_counters(json& out, const counts& counted) {
  out.raw("{");
  for (size_t i = 0; i < counted.size(); ++i) {
    out.key(counter_names[i]);
    counted[i] >= 0 ? out.value(counted[i]) : out.raw("null");
  }
  out.raw("}");
}

void add_summary(json& out, const profile_session& s, double per_tick) {
  const int32_t thread_count = s.thread_count.load();
  out.raw("{").key("version").value(version_number);
  out.key("seconds").value(s.seconds);
  int64_t calls_skipped = 0;
  for (int32_t i = 0; i < thread_count; ++i) calls_skipped += s.thread_at(i).skipped;
  out.key("calls_skipped").value(calls_skipped);
  out.key("calls_dropped").value(s.calls.dropped() + s.lost_calls.load());
  out.key("tasks_dropped").value(s.tasks.dropped());
  out.key("counters_note");
  s.counters&& s.why_not.empty() ? out.raw("null")
                                 : out.value(s.counters ? s.why_not.c_str() : "hardware counters were not asked for");
  std::vector<work> of_calls(static_cast<size_t>(s.calls.kept())), of_threads(static_cast<size_t>(thread_count));
  for (int64_t i = 0; i < s.workers.kept(); ++i) {
    const worker_record& w = s.workers[i];
    if (w.thread < 0 || w.tasks == 0) continue;
    of_threads[static_cast<size_t>(w.thread)].add(w, static_cast<uint64_t>(s.calls[w.call].stands_for));
    of_calls[static_cast<size_t>(w.call)].add(w);
  }
  // Calls inside others began after them.
  for (int64_t i = s.calls.kept() - 1; i >= 0; --i) {
    if (s.calls[i].done && s.calls[i].within >= 0)
      of_calls[static_cast<size_t>(s.calls[i].within)].add(of_calls[static_cast<size_t>(i)]);
  }
  out.key("threads").raw("[");
  for (int32_t i = 0; i < thread_count; ++i) {
    const work& w = of_threads[static_cast<size_t>(i)];
    out.item().raw("{").key("thread").value(s.thread_at(i).id).key("tasks").value(w.tasks);
    add_phases(out, &w, per_tick, s.seconds);
    out.key("counters");
    s.counters ? add_counters(out, s.thread_at(i).counted) : void(out.raw("null"));
    out.raw("}");
  }
  out.raw("]").key("calls").raw("[");
  for (int64_t i = 0; i < s.calls.kept(); ++i)
    if (s.calls[i].done) add_call(out, s, s.calls[i], of_calls[static_cast<size_t>(i)], per_tick);
  out.raw("]}");
}

void add_slice(json& out, const char* name, const char* kind, int64_t thread, double start, double seconds) {
  out.item().raw("\n{").key("ph").value("X").key("name").value(name).key("cat").value(kind);
  out.key("pid").value(1).key("tid").value(thread).key("ts").value(start * 1e6).key("dur").value(seconds * 1e6);
}

// A run of tasks and, inside one that was looked into, its phases, one after another: in truth they take turns.
void add_task(json& out, const profile_session& s, const task_record& task, double per_tick) {
  const worker_record& worker = s.workers[task.worker.load(std::memory_order_acquire) - 1];
  const auto seconds = [per_tick](uint64_t ticks) { return static_cast<double>(ticks) * per_tick; };
  const int64_t thread = s.thread_at(worker.thread).id;
  const bool kernel = worker.what == phase_count;
  double start = seconds(task.begin);
  add_slice(out, kernel ? "task" : phase_names[worker.what], "task", thread, start, seconds(task.end - task.begin));
  out.key("args").raw("{").key("call").value(worker.call).key("tasks").value(task.tasks);
  if (kernel) {
    const int64_t kv_heads = s.problems[s.calls[worker.call].problem].p.kv_heads;
    out.key("batch").value(task.batch + task.kv_head / kv_heads).key("kv_head").value(task.kv_head % kv_heads);
    out.key("chunk").value(task.chunk);
    out.key("row_begin").value(task.row_begin).key("row_end").value(task.row_end);
  }
  out.raw("}}");
  for (int i = 0; i < phase_count && task.phases >= 0; ++i) {
    const double length = seconds(s.phases[task.phases].ticks[i]);
    if (length == 0) continue;
    add_slice(out, phase_names[i], "phase", thread, start, length);
    out.raw("}");
    start += length;
  }
}

// The form that Perfetto and Chrome read, with the summary under a key that they pass over.
void add_trace(json& out, const profile_session& s, double per_tick) {
  out.raw("{").key("displayTimeUnit").value("ns").key("manyhead");
  add_summary(out, s, per_tick);
  out.key("traceEvents").raw("[");
  out.item().raw("\n{").key("ph").value("M").key("name").value("process_name").key("pid").value(1);
  out.key("args").raw("{").key("name").value("manyhead").raw("}}");
  for (int64_t i = 0; i < s.calls.kept(); ++i) {
    const call_record& call = s.calls[i];
    if (!call.done) continue;
    add_slice(out, title_of(s, call).c_str(), "call", s.thread_at(call.thread).id, call.start, call.seconds);
    out.key("args").raw("{").key("call").value(i).key("threads").value(call.threads);
    out.key("stands_for").value(call.stands_for).raw("}}");
  }
  for (int64_t i = 0; i < s.tasks.kept(); ++i)
    if (s.tasks[i].worker.load(std::memory_order_acquire) != 0) add_task(out, s, s.tasks[i], per_tick);
  out.raw("]}");
}

}  // namespace

std::string text_of(const profile_session& s, int32_t format) {
  const double per_tick = s.ticks > 0 ? s.seconds / static_cast<double>(s.ticks) : 0.0;
  json out;
  format == MH_PROFILE_TRACE ? add_trace(out, s, per_tick) : add_summary(out, s, per_tick);
  return out.text;
}

}  // namespace manyhead
