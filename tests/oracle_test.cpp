// The second oracle: attention composed of OpenBLAS products and a plain softmax, at sizes that the reference would
// take minutes for. It shares nothing with the kernels, and little with the reference.
#include <doctest/doctest.h>

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "exec_of.hpp"
#include "plan.hpp"
#include "registry.hpp"
#include "scheduler.hpp"
#include "test_case.hpp"

namespace manyhead::test {
namespace {

void product(CBLAS_TRANSPOSE b_form, int m, int n, int k, float alpha, const float* a, const float* b, int b_row,
             float* c) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, b_form, m, n, k, alpha, a, k, b, b_row, 0.0F, c, n);
}
void product(CBLAS_TRANSPOSE b_form, int m, int n, int k, double alpha, const double* a, const double* b, int b_row,
             double* c) {
  cblas_dgemm(CblasRowMajor, CblasNoTrans, b_form, m, n, k, alpha, a, k, b, b_row, 0.0, c, n);
}

// One head of contiguous arrays: out and lse.
template <class Real>
void compose(const problem& p, const Real* q, const Real* k, const Real* v, Real* out, Real* lse) {
  const auto rows = static_cast<int>(p.q_len), keys = static_cast<int>(p.kv_len);
  const auto dim = static_cast<int>(p.head_dim), v_dim = static_cast<int>(p.v_dim);
  std::vector<Real> scores(static_cast<size_t>(p.q_len * p.kv_len));
  product(CblasTrans, rows, keys, dim, static_cast<Real>(p.scale), q, k, dim, scores.data());
  const int64_t shift = p.align == MH_ALIGN_BOTTOM_RIGHT ? p.kv_len - p.q_len : 0;
  for (int64_t i = 0; i < p.q_len; ++i) {
    Real* s = scores.data() + i * p.kv_len;
    const int64_t seen = p.causal ? std::clamp<int64_t>(i + shift + 1, 0, p.kv_len) : p.kv_len;
    const Real top = seen > 0 ? *std::max_element(s, s + seen) : 0;
    double sum = 0;
    for (int64_t j = 0; j < p.kv_len; ++j) sum += s[j] = j < seen ? std::exp(s[j] - top) : 0;
    for (int64_t j = 0; j < seen; ++j) s[j] = static_cast<Real>(s[j] / sum);
    lse[i] = static_cast<Real>(static_cast<double>(top) + std::log(sum));
  }
  product(CblasNoTrans, rows, v_dim, keys, Real{1}, scores.data(), v, v_dim, out);
}

template <class Real>
void check(const std::string& text, double tolerance) {
  test_case c(parse_problem(text));
  const problem& p = c.p;
  std::vector<Real> out(static_cast<size_t>(p.batch * p.heads * p.q_len * p.v_dim)),
      lse(static_cast<size_t>(p.batch * p.heads * p.q_len));
  for (int64_t head = 0; head < p.batch * p.heads; ++head) {
    const int64_t kv_head = head / p.heads * p.kv_heads + head % p.heads / p.group();
    compose(p, static_cast<const Real*>(c.t.q) + head * p.q_len * p.head_dim,
            static_cast<const Real*>(c.t.k) + kv_head * p.kv_len * p.head_dim,
            static_cast<const Real*>(c.t.v) + kv_head * p.kv_len * p.v_dim, out.data() + head * p.q_len * p.v_dim,
            lse.data() + head * p.q_len);
  }
  for (int32_t isa = 0; isa < isa_count(); ++isa) {
    if (!isa_supported(isa)) continue;
    c.clear_outputs();
    run(make_plan(p, *isa_table(isa), 1 << 20), check_tensors(p, c.t), exec_of(0));
    const auto worst = [&](const void* got, const std::vector<Real>& want) {
      double share = 0;
      for (size_t i = 0; i < want.size(); ++i) {
        const double error =
            std::fabs(static_cast<double>(static_cast<const Real*>(got)[i]) - static_cast<double>(want[i]));
        const double now = error / (tolerance + tolerance * std::fabs(static_cast<double>(want[i])));
        share = now <= share ? share : now;
      }
      return share;
    };
    INFO(std::string(text));
    INFO(std::string(isa_table(isa)->isa));
    CHECK(worst(c.t.out, out) <= 1);
    CHECK(worst(c.t.lse, lse) <= 1);
    CHECK(c.damage() == "");
  }
}

TEST_CASE("large shapes agree with OpenBLAS") {
  for (const char* options : {"", " causal align=br"}) {
    for (const char* shape : {"b2 h8 q1024 kv1024 d64", "b1 h8/2 q1024 kv1024 d128", "b1 h3 q777 kv1501 d80 v96",
                              "b2 h8/2 q16 kv4096 d128", "b1 h8/2 q1 kv8192 d128"})
      check<float>(std::string("f32 ") + shape + " lse" + options, 2e-5);
    check<double>(std::string("f64 b1 h4 q1024 kv1024 d64 lse") + options, 1e-12);
  }
}

}  // namespace
}  // namespace manyhead::test
