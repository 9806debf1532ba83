// Problems as lines of text: what mh_plan_describe prints before ": ", MH_VERBOSE logs, and mh_problem_parse reads
// (manyhead.h: what a line may have).
#pragma once

#include <string_view>

#include "error.hpp"
#include "problem.hpp"

namespace manyhead {

struct problem_text {
  char text[512];
};
problem_text to_text(const problem& p) noexcept;

// A line that is no problem: the sentence, and where the word at fault begins.
class line_error : public error {
 public:
  line_error(const std::string& text, size_t column) : error(MH_INVALID_ARGUMENT, text), column_(column) {}
  size_t column() const noexcept { return column_; }

 private:
  size_t column_;
};

// The problem as a caller fills it in; whether it makes sense is for validate() to say. Throws line_error.
mh_problem parse_problem(std::string_view line);

}  // namespace manyhead
