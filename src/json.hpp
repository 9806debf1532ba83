// Writes JSON: numbers in their shortest form whatever the locale, strings with what needs it escaped. Whoever writes opens
// and closes objects and lists with raw(); commas come by themselves.
#pragma once

#include <string>

#include "check.hpp"

namespace manyhead {

class json {
 public:
  std::string text;

  // Begins an element of the list or object that is open.
  json& item() {
    if (!text.empty() && text.back() != '[' && text.back() != '{') text += ", ";
    return *this;
  }
  json& key(const char* name) {
    item().text += '"';
    text += name;
    text += "\": ";
    return *this;
  }
  json& value(const char* x) {
    text += '"';
    for (; *x != 0; ++x) {
      if (*x == '"' || *x == '\\') text += '\\';
      text += static_cast<unsigned char>(*x) < ' ' ? ' ' : *x;
    }
    text += '"';
    return *this;
  }
  json& value(bool x) { return raw(x ? "true" : "false"); }
  json& value(number auto x) {
    append(text, x);
    return *this;
  }
  json& raw(const char* x) {
    text += x;
    return *this;
  }
};

}  // namespace manyhead
