// Reads tests/problems.txt: problems as src/problem_line.hpp reads them, and words that only tests use (test_case.hpp
// says what they do):
//   [extra=<n>] [data=<kind>] [strides=<kind>] [bcast=<some of b h q k>] [unit]
#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "problem_line.hpp"

namespace manyhead::test {

struct problem_line {
  std::string text;
  mh_problem problem{};  // as a caller fills it in
  int64_t extra_keys = 0;
  std::string data = "normal";
  std::string strides;
  std::string broadcast;
  bool on_unit = false;  // a matrix unit takes it, where there is one for the type
};

// True where the word is one of the tests' own.
inline bool read_test_word(const std::string& word, problem_line& line) {
  const auto value_of = [&](std::string_view name, std::string& value) {
    if (!word.starts_with(std::string(name) + '=')) return false;
    value = word.substr(name.size() + 1);
    return true;
  };
  const auto known = [&](const std::string& value, std::initializer_list<std::string_view> kinds) {
    if (std::find(kinds.begin(), kinds.end(), value) == kinds.end())
      throw std::invalid_argument("no such kind: " + word);
    return true;
  };
  if (word == "unit") return line.on_unit = true;
  if (std::string digits; value_of("extra", digits)) {
    line.extra_keys = std::stoll(digits);
    return true;
  }
  if (value_of("data", line.data))
    return known(line.data, {"normal",  "heavy",  "equal",  "huge",   "maxval", "denormal", "masked",
                             "nanbias", "padded", "padnan", "blocks", "stairs", "topval",   "farsinks",
                             "opposed", "large",  "poison", "small",  "spread", "tinyk",    "tinyq"});
  if (value_of("strides", line.strides))
    return known(line.strides, {"packed", "transposed", "zero", "negative", "reversed", "lastdim", "qout", "odd"});
  if (!value_of("bcast", line.broadcast)) return false;
  if (line.broadcast.empty() || line.broadcast.find_first_not_of("bhqk") != std::string::npos)
    throw std::invalid_argument("no such dimensions: " + word);
  return true;
}

// Throws manyhead::line_error or std::invalid_argument naming the word that it does not know.
inline problem_line parse_problem(const std::string& text) {
  problem_line line;
  line.text = text;
  std::istringstream words(text);
  std::string rest;
  for (std::string word; words >> word;) {
    if (!read_test_word(word, line)) rest += word + ' ';
  }
  line.problem = manyhead::parse_problem(rest);
  return line;
}

// The problems of a file; empty lines and what follows '#' are not looked at.
inline std::vector<problem_line> read_problems(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::invalid_argument("cannot read " + path);
  std::vector<problem_line> lines;
  for (std::string text; std::getline(file, text);) {
    text.erase(std::min(text.find('#'), text.size()));
    text.erase(text.find_last_not_of(" \t\r") + 1);
    if (!text.empty()) lines.push_back(parse_problem(text));
  }
  return lines;
}

}  // namespace manyhead::test
