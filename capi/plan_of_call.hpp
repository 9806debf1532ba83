// Plans as the C border makes them: from a caller's mh_problem, for this machine.
#pragma once

#include <cstddef>
#include <cstring>
#include <optional>

#include "check.hpp"
#include "machine.hpp"
#include "plan.hpp"
#include "problem.hpp"
#include "profile.hpp"
#include "registry.hpp"

namespace manyhead {

// What new plans and layers take from the environment: wrong settings are reported here, a bad MH_ISA by current_isa().
inline const kernel_table& isa_of_new_plans() {
  watch_as_environment_says();
  return current_isa();
}

inline plan new_plan(const mh_problem& problem, const kernel_table& table) {
  return make_plan(validate(problem), table, this_machine());
}

// The plan of a single call: that of this thread's last one, where nothing has changed that plans depend on. Planning takes
// as long as attending to ten keys. One of its own while the last one runs: a host's pool may make other calls on its thread.
class plan_of_call {
 public:
  explicit plan_of_call(const mh_problem* problem) {
    if (is_of_this_version(problem)) {
      find(*problem);
    } else {
      find(read_struct(problem, offsetof(mh_problem, q_strides), "problem"));
    }
  }
  ~plan_of_call() {
    if (last_ != nullptr) --last_->runs;
  }
  plan_of_call(const plan_of_call&) = delete;
  plan_of_call& operator=(const plan_of_call&) = delete;

  const plan& get() const { return last_ != nullptr ? last_->plan : *own_; }

 private:
  struct last_plan {
    mh_problem problem{};
    const kernel_table* table = nullptr;
    manyhead::plan plan{};
    int runs = 0;  // at this moment, one inside the other
  };

  void find(const mh_problem& asked) {
    const kernel_table& table = isa_of_new_plans();
    thread_local last_plan last;
    if (last.table != &table || std::memcmp(&asked, &last.problem, sizeof asked) != 0) {
      if (last.runs > 0) {
        own_.emplace(new_plan(asked, table));
        return;
      }
      last.table = nullptr;  // should planning fail
      last.plan = new_plan(asked, table);
      last.problem = asked;
      last.table = &table;
    }
    last_ = &last;
    ++last.runs;
  }

  last_plan* last_ = nullptr;
  std::optional<manyhead::plan> own_;
};

}  // namespace manyhead
