// The version in manyhead.h.
#pragma once

#include <cstdint>

#include "manyhead/manyhead.h"

#define MH_TEXT_(x) #x
#define MH_TEXT(x) MH_TEXT_(x)

namespace manyhead {

inline constexpr const char* version_text =
    MH_TEXT(MH_VERSION_MAJOR) "." MH_TEXT(MH_VERSION_MINOR) "." MH_TEXT(MH_VERSION_PATCH);
inline constexpr int32_t version_number = MH_VERSION_MAJOR * 10000 + MH_VERSION_MINOR * 100 + MH_VERSION_PATCH;

}  // namespace manyhead

#undef MH_TEXT
#undef MH_TEXT_
