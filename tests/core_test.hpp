// What tests of the portable core share.
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "plan.hpp"
#include "problem_line.hpp"
#include "registry.hpp"
#include "test_case.hpp"

namespace manyhead::test {
namespace {

constexpr int64_t l2 = 1 << 20;

// Every ISA of this CPU. Under a sanitizer kernels are a hundred times slower and one ISA has to do: scheduling is the
// same for all, and kernel_test still runs each one's kernels.
std::vector<const kernel_table*> tables() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return {&current_isa()};
#endif
  std::vector<const kernel_table*> list;
  for (int32_t i = 0; i < isa_count(); ++i)
    if (isa_supported(i)) list.push_back(isa_table(i));
  return list;
}

problem problem_of(const std::string& text) { return test_case(parse_problem(text), false).p; }
plan plan_of(const std::string& text) { return make_plan(problem_of(text), current_isa(), l2); }

}  // namespace
}  // namespace manyhead::test
