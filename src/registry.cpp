// See registry.hpp. The rows come from src/kernels/meson.build by way of the generated isa_list.inc, best first; each
// table is named here, so the linker keeps it and nothing has to register itself at start-up.
#include "registry.hpp"

#include <array>
#include <atomic>
#include <iterator>
#include <string>
#include <utility>

#include "check.hpp"
#include "machine.hpp"

namespace manyhead {

#define MH_ISA_ROW(name, ...)             \
  namespace name {                        \
  const kernel_table* kernels() noexcept; \
  }
#include "kernels/isa_list.inc"
#undef MH_ISA_ROW

namespace {

struct isa_row {
  const char* name;
  cpu_level level;
  const kernel_table* (*kernels)() noexcept;
  const kernel_table* (*over)() noexcept;  // whose kernels it has besides those of its unit; itself: it has all
};

constexpr isa_row built[] = {
#define MH_ISA_ROW(name, level, over) {#name, cpu_level::level, name::kernels, over::kernels},
#include "kernels/isa_list.inc"
#undef MH_ISA_ROW
};
constexpr int32_t row_count = std::size(built);

struct filled_row : isa_row {
  kernel_table table;
};

void add_unit(kernel_table& t, const kernel_table& unit) {
  const bool f32 = this_machine().f32_on_unit;
  t.isa = unit.isa;
  for (int32_t i = 0; i < dtype_count; ++i) {
    if (i == MH_DTYPE_F32 && !f32) continue;
    const dtype_kernels& from = unit.dtype[i];
    dtype_kernels& to = t.dtype[i];
    if (from.linear_unit.run != nullptr) to.linear_unit = from.linear_unit;
    if (from.attention[route_matrix] == nullptr) continue;
    to.attention[route_matrix] = from.attention[route_matrix];
    to.scratch_bytes[route_matrix] = from.scratch_bytes[route_matrix];
    if (from.attention[route_decode] != nullptr) {
      to.attention[route_decode] = from.attention[route_decode];
      to.scratch_bytes[route_decode] = from.scratch_bytes[route_decode];
    }
    to.unit_steps = from.unit_steps;
    to.matrix_rows = from.matrix_rows;
    to.matrix_keys = from.matrix_keys;
    if (from.arithmetic == nullptr) continue;
    to.arithmetic = from.arithmetic;
    to.flops_of_turn = from.flops_of_turn;
  }
}

// The best on this CPU first: where the level below is faster, its row comes before.
std::array<filled_row, row_count> in_order() {
  std::array<filled_row, row_count> order{};
  for (size_t i = order.size(); i-- > 0;) {  // what a row is over stands behind it
    size_t from = i;
    while (built[from].kernels != built[i].over) ++from;
    order[i] = {built[i], from == i ? *built[i].kernels() : order[from].table};
    if (from != i) add_unit(order[i].table, *built[i].kernels());
  }
  for (size_t i = 0; i + 1 < order.size(); ++i) {
    const int level = static_cast<int>(order[i].level);
    if (!this_machine().slow_level[level] || static_cast<int>(order[i + 1].level) != level - 1) continue;
    std::swap(order[i], order[i + 1]);
    ++i;
  }
  return order;
}
const filled_row& row(int32_t i) {
  static const std::array<filled_row, row_count> order = in_order();
  return order[static_cast<size_t>(i)];
}

constexpr int32_t automatic = -1;
constexpr int32_t unset = -2;  // set_isa has not been called: MH_ISA counts
std::atomic<int32_t> forced{unset};

std::string names() {
  std::string text;
  for (int32_t i = 0; i < row_count; ++i) text += (text.empty() ? "" : ", ") + std::string(row(i).name);
  return text;
}

// `who` names where the name came from.
int32_t find(const char* who, const std::string& name) {
  for (int32_t i = 0; i < row_count; ++i) {
    if (name != row(i).name) continue;
    if (!isa_supported(i)) {
      fail(MH_UNSUPPORTED, who, " is \"", name, "\", which this CPU (", this_machine().cpu_name, ") cannot run");
    }
    return i;
  }
  invalid(who, " is \"", name, "\", must be one of: ", names());
}

}  // namespace

int32_t isa_count() noexcept { return row_count; }

const kernel_table* isa_table(int32_t isa) { return isa >= 0 && isa < row_count ? &row(isa).table : nullptr; }

bool isa_supported(int32_t isa) {
  return isa >= 0 && isa < row_count && this_machine().has_level[static_cast<int>(row(isa).level)];
}

const kernel_table& current_isa() {
  // Looked up even where set_isa overrules it: a wrong MH_ISA is never passed over, by no call, as what throws is tried again.
  static const int32_t requested = [] {
    const std::string& request = this_machine().isa_request;
    return request.empty() ? automatic : find("the environment variable MH_ISA", request);
  }();
  const int32_t set = forced.load(std::memory_order_relaxed);
  const int32_t wanted = set == unset ? requested : set;
  if (wanted >= 0) return row(wanted).table;
  for (int32_t i = 0; i < row_count; ++i) {
    if (isa_supported(i)) return row(i).table;
  }
  fail(MH_UNSUPPORTED, "this CPU (", this_machine().cpu_name, ") can run none of: ", names());
}

const kernel_table& find_isa(const char* name) { return row(find("isa", name)).table; }

void set_isa(const char* name) {
  forced.store(name == nullptr || *name == 0 ? automatic : find("isa", name), std::memory_order_relaxed);
}

}  // namespace manyhead
