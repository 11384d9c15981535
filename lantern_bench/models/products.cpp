// Products of few rows with weights that are stored narrow and widened to float32 in registers.
//
// A weight [out, in] lies in panels of 64 outputs, [panels, in, 64]. Each output is one sum over `in` in order, so that
// its bits depend neither on the number of rows nor on that of threads.

#include <immintrin.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace {

using torch::stable::Tensor;

constexpr int64_t kPanel = 64;   // outputs
constexpr int64_t kDepth = 256;  // inputs at a time: 64 KiB of a panel in float32 stay in the cache
constexpr int kRows = 6;         // rows whose sums fit into the registers

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int kLanes = 16, kFew = 4, kMany = 4;  // sums a row; with few rows more, so that none waits for the last
using Lanes = __m512;
Lanes load(const float* at) { return _mm512_loadu_ps(at); }
Lanes load(const Half* at) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))); }
Lanes load(const BFloat* at) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
void store(float* at, Lanes value) { _mm512_storeu_ps(at, value); }
Lanes all(float value) { return _mm512_set1_ps(value); }
Lanes add_product(Lanes a, Lanes b, Lanes sum) { return _mm512_fmadd_ps(a, b, sum); }
#else  // AVX2, which comes with FMA and F16C; elsewhere this file does not compile, and the package does without it
constexpr int kLanes = 8, kFew = 4, kMany = 2;
using Lanes = __m256;
Lanes load(const float* at) { return _mm256_loadu_ps(at); }
Lanes load(const Half* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }
Lanes load(const BFloat* at) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
void store(float* at, Lanes value) { _mm256_storeu_ps(at, value); }
Lanes all(float value) { return _mm256_set1_ps(value); }
Lanes add_product(Lanes a, Lanes b, Lanes sum) { return _mm256_fmadd_ps(a, b, sum); }
#endif

// `rows` of a product with one panel, for inputs `from` to `to`; all but the first inputs continue the sums in `y`.
template <int rows, typename Weight>
void tile(const float* x, int64_t in, int64_t from, int64_t to, const Weight* panel, float* y, int64_t out) {
  constexpr int wide = rows <= 2 ? kFew : kMany;
  for (int64_t column = 0; column < kPanel; column += wide * kLanes) {
    Lanes sums[rows][wide];
    for (int row = 0; row < rows; ++row)
      for (int part = 0; part < wide; ++part)
        sums[row][part] = from == 0 ? all(0.0f) : load(y + row * out + column + part * kLanes);
    for (int64_t k = from; k < to; ++k) {
      Lanes weights[wide];
      for (int part = 0; part < wide; ++part) weights[part] = load(panel + (k - from) * kPanel + column + part * kLanes);
      for (int row = 0; row < rows; ++row) {
        const Lanes value = all(x[row * in + k]);
        for (int part = 0; part < wide; ++part) sums[row][part] = add_product(value, weights[part], sums[row][part]);
      }
    }
    for (int row = 0; row < rows; ++row)
      for (int part = 0; part < wide; ++part) store(y + row * out + column + part * kLanes, sums[row][part]);
  }
}

template <typename Weight>
void tiles(const float* x, int64_t rows, int64_t in, int64_t from, int64_t to, const Weight* panel, float* y,
           int64_t out) {
  for (int64_t left = (rows + kRows - 1) / kRows; left > 0; --left) {
    const int64_t height = (rows + left - 1) / left;  // as equal as possible
    switch (height) {
      case 1: tile<1>(x, in, from, to, panel, y, out); break;
      case 2: tile<2>(x, in, from, to, panel, y, out); break;
      case 3: tile<3>(x, in, from, to, panel, y, out); break;
      case 4: tile<4>(x, in, from, to, panel, y, out); break;
      case 5: tile<5>(x, in, from, to, panel, y, out); break;
      default: tile<6>(x, in, from, to, panel, y, out);
    }
    x += height * in, y += height * out, rows -= height;
  }
}

template <typename Weight>
void multiply(const float* x, int64_t rows, int64_t in, const Weight* weight, float* y, int64_t panels) {
  const int64_t out = panels * kPanel;
  torch::stable::parallel_for(0, panels, 1, [&](int64_t first, int64_t end) {
    std::vector<float> widened;
    for (int64_t number = first; number < end; ++number) {
      for (int64_t from = 0; from < in; from += kDepth) {
        const int64_t to = std::min(in, from + kDepth);
        const Weight* panel = weight + (number * in + from) * kPanel;
        float* corner = y + number * kPanel;
        if (std::is_same_v<Weight, float> || rows <= 2 * kRows) {
          tiles(x, rows, in, from, to, panel, corner, out);
        } else {  // widened once for all rows
          widened.resize(kDepth * kPanel);
          for (int64_t at = 0; at < (to - from) * kPanel; at += kLanes) store(widened.data() + at, load(panel + at));
          tiles(x, rows, in, from, to, const_cast<const float*>(widened.data()), corner, out);
        }
      }
    }
  });
}

// x float32 [rows, in], weight [panels, in, 64] -> float32 [rows, panels * 64].
Tensor panel_linear(const Tensor& x, const Tensor& weight) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && x.size(1) == weight.size(1));
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && weight.size(2) == kPanel);
  const int64_t rows = x.size(0), in = x.size(1), panels = weight.size(0);
  Tensor y = torch::stable::new_empty(x, {rows, panels * kPanel});
  const auto* from = static_cast<const float*>(x.data_ptr());
  auto* to = static_cast<float*>(y.data_ptr());
  const void* weights = weight.data_ptr();
  switch (weight.scalar_type()) {
    case ScalarType::Half: multiply(from, rows, in, static_cast<const Half*>(weights), to, panels); break;
    case ScalarType::BFloat16: multiply(from, rows, in, static_cast<const BFloat*>(weights), to, panels); break;
    case ScalarType::Float: multiply(from, rows, in, static_cast<const float*>(weights), to, panels); break;
    default: STD_TORCH_CHECK(false, "weights must be float32, float16 or bfloat16");
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lantern_bench, CPU, library) {
  library.impl("panel_linear", TORCH_BOX(&panel_linear));
}
