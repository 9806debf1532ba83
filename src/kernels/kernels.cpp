// The one source of all kernels, compiled once per ISA with that ISA's flags (src/kernels/meson.build):
//   MH_ISA  the ISA's name, a namespace       MH_ARCH  its xsimd architecture
//   MH_UNIT_ALONE  it has another ISA's kernels but for those of its matrix unit, which are all that is compiled
// Exports one symbol, manyhead::MH_ISA::kernels(), which only hands out constants: it is called on CPUs without the ISA too.
#include "attention_tile.hpp"
#include "decode.hpp"
#include "kernel_api.hpp"
#if MH_MATRIX
#include "matrix.hpp"
#endif
#include "linear_unit.hpp"
#include "merge.hpp"
#include "openings.hpp"
#include "probe.hpp"
#include "scores_output.hpp"
#include "weights.hpp"

namespace manyhead::MH_ISA {
namespace {

#if MH_MATRIX
// Whether the matrix unit does attention of the type. Alone, a unit of f16 stands on one of bf16, which has the others.
template <class D>
constexpr bool takes_unit() {
  if constexpr (sizeof(typename D::real) == 4) {
    using values = typename unit_number<D>::values;
#if MH_UNIT_ALONE && MH_UNIT_F16
    return std::is_same_v<typename values::format, in_f16>;
#else
    return values::parts <= unit_parts;
#endif
  }
  return false;
}
#endif

template <class D, class Real>
constexpr dtype_kernels kernels_of() {
  dtype_kernels k{};
#if !MH_UNIT_ALONE
  k.attention[route_tile] = attention_tile<D>;
  k.attention[route_decode] = attention_decode<D>;
  k.scratch_bytes[route_tile] = tile_task<D>::scratch_bytes;
  k.scratch_bytes[route_decode] = decode_task<D>::scratch_bytes;
  k.weights = attention_weights<Real>;
  k.scores = attention_scores<D>;
  k.open_mask = open_mask;
  k.open_key_mask = open_key_mask;
  k.open_bias = open_bias<typename D::real>;
  k.merge = merge_rows<D, D>;
  k.merge_real = merge_rows<Real, D>;
  k.arithmetic = multiply_adds<typename D::real>;
  k.flops_of_turn = flops_of_turn<typename D::real>;
  k.linear = linear_task<D>;
  if constexpr (linear_widens<D>) k.widen = linear_widen<D>;
#endif
#if MH_MATRIX
  if constexpr (takes_unit<D>()) {
    k.attention[route_matrix] = attention_matrix<D>;
    k.scratch_bytes[route_matrix] = matrix_task<D>::scratch_bytes;
    if constexpr (sizeof(typename D::storage) == 2) {  // of f32 it does several for one, besides those of vectors
      k.arithmetic = unit_multiply_adds<typename unit_number<D>::values::format>;
      k.flops_of_turn = unit_flops_of_turn;
    }
    k.matrix_rows = unit_least<unit_number<D>::values::parts>.rows;
    k.matrix_keys = unit_least<unit_number<D>::values::parts>.keys;
    if constexpr (unit_takes_tiles<D> || unit_takes_pairs<D>) {
      k.attention[route_decode] = attention_decode<D>;
      k.scratch_bytes[route_decode] = decode_task<D>::scratch_bytes;
      k.unit_steps = unit_takes_tiles<D> ? steps_of_tiles : steps_of_pairs;
    }
    k.linear_unit = linear_unit<D>;
  }
#endif
  return k;
}

#define MH_TEXT_(x) #x
#define MH_TEXT(x) MH_TEXT_(x)

constexpr kernel_table table = {MH_TEXT(MH_ISA),
                                static_cast<int32_t>(lanes<float>),
                                {static_cast<int32_t>(panel_width<float>), static_cast<int32_t>(panel_width<double>)},
                                {
#define MH_DTYPE_ROW(enumerator, trait, real) kernels_of<trait, real>(),
#include "instances.inc"
#undef MH_DTYPE_ROW
                                },
                                {static_cast<int32_t>(linear_width<float>), static_cast<int32_t>(linear_width<double>)},
                                read_memory};

#define MH_DTYPE_ROW(enumerator, trait, real) +1
static_assert(0
#include "instances.inc"
                  == dtype_count,
              "a dtype of manyhead.h has no row in instances.inc");
#undef MH_DTYPE_ROW

}  // namespace

const kernel_table* kernels() noexcept;
const kernel_table* kernels() noexcept { return &table; }

}  // namespace manyhead::MH_ISA
