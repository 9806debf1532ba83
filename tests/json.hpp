// Whether a text is JSON: for tests of what the library prints.
#pragma once

#include <cctype>
#include <charconv>
#include <cstring>
#include <string>

namespace manyhead::test {

// A JSON value at `at`; moves past it. Strings without escapes are enough here.
inline bool skip_json(const std::string& text, size_t& at) {
  const auto spaces = [&] {
    while (at < text.size() && std::isspace(static_cast<unsigned char>(text[at]))) ++at;
  };
  const auto take = [&](char c) { return spaces(), at < text.size() && text[at] == c && ++at; };
  const auto string = [&] {
    if (!take('"')) return false;
    while (at < text.size() && text[at] != '"' && text[at] != '\\' && text[at] >= ' ') ++at;
    return take('"');
  };
  spaces();
  if (at == text.size()) return false;
  if (text[at] == '"') return string();
  if (text[at] == '{' || text[at] == '[') {
    const bool object = text[at++] == '{';
    if (take(object ? '}' : ']')) return true;
    do {
      if (object && !(string() && take(':'))) return false;
      if (!skip_json(text, at)) return false;
    } while (take(','));
    return take(object ? '}' : ']');
  }
  for (const char* word : {"true", "false", "null"})
    if (text.compare(at, std::strlen(word), word) == 0) return at += std::strlen(word), true;
  const size_t digit = text[at] == '-' ? at + 1 : at;  // from_chars reads inf and nan too
  if (digit == text.size() || !std::isdigit(static_cast<unsigned char>(text[digit]))) return false;
  double number = 0;
  const auto [end, failed] = std::from_chars(text.data() + at, text.data() + text.size(), number);
  at = static_cast<size_t>(end - text.data());
  return failed == std::errc();
}

inline bool is_json(const std::string& text) {
  size_t at = 0;
  return skip_json(text, at) && at == text.size();
}

}  // namespace manyhead::test
