// Products of few rows, and attention of few nodes. Sums are float32 numbers.
//
// A weight [out, in] lies in panels of 64 outputs, [panels, in, 64]; it is stored narrow and widened in registers. Where
// the processor multiplies pairs of bfloat16 numbers, a bfloat16 weight lies in [panels, in / 2, 64, 2]. Each number of
// a result is one sum in order, so that its bits depend neither on the number of rows nor on that of threads.
// Attention of one or two nodes, or of one beside full vectors, adds the lanes of a vector at the end.

#include <immintrin.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

using torch::stable::Tensor;

constexpr int64_t kPanel = 64;    // outputs
constexpr int64_t kNear = 16384;  // bytes used at a time: they and the next ones stay in the first cache
constexpr int kRows = 6;          // rows whose sums fit into the registers
constexpr int kLine = 64;         // bytes the processor reads at once

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int kLanes = 16, kFew = 4, kMany = 4;  // vectors of a row; with few rows more, so that no sum waits
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
Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
Lanes rounded(Lanes x) { return _mm512_roundscale_ps(x, 0); }
Lanes times_power(Lanes x, Lanes n) { return _mm512_scalef_ps(x, n); }  // x * 2^n
Lanes zero_below(Lanes x, float least, Lanes value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(least), _CMP_GE_OQ), value);
}
float sum_of(Lanes x) { return _mm512_reduce_add_ps(x); }
float largest_of(Lanes x) { return _mm512_reduce_max_ps(x); }
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
Lanes larger(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
Lanes rounded(Lanes x) { return _mm256_round_ps(x, 0); }
Lanes times_power(Lanes x, Lanes n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
Lanes zero_below(Lanes x, float least, Lanes value) {
  return _mm256_and_ps(_mm256_cmp_ps(x, all(least), _CMP_GE_OQ), value);
}
float sum_of(Lanes x) {
  const __m128 four = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1), two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}
float largest_of(Lanes x) {
  float most = x[0];
  for (int lane = 1; lane < kLanes; ++lane) most = std::max(most, x[lane]);
  return most;
}
#endif

#if defined(__AVX512BF16__) && defined(__AVX512F__)
// Two bfloat16 numbers next to each other, of x or of an output's weights.
struct Pair {
  uint32_t bits;
};
__m512bh load(const Pair* at) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(at)); }
__m512bh all(Pair value) { return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(value.bits))); }
Lanes add_product(__m512bh a, __m512bh b, Lanes sum) { return _mm512_dpbf16_ps(sum, a, b); }
#endif

// Ask for numbers before they are used: they may lie in memory.
template <typename Number>
void ask_for(const Number* from, int64_t count) {
  for (int64_t at = 0; at < count; at += kLine / sizeof(Number)) __builtin_prefetch(from + at);
}

// y[row][column] += sum over k of x[row][k] * w[k][column]; `fresh`: y holds nothing yet. X: float or Pair.
template <typename X>
struct Product {
  const X* x;
  int64_t x_row, x_k;  // distances of numbers in memory
  int64_t steps;       // of k
  int64_t w_k;
  float* y;
  int64_t y_row;
  bool fresh;
  // Few rows wait for memory, so each step of a tile asks for as much as it reads. Otherwise a tile asks for its share
  // before it begins.
  bool few = false;
  const char* next = nullptr;
  int64_t next_bytes = 0;
  int64_t next_step = 0;  // bytes that a tile asks for per step of its own

  // These numbers are used after the product; they may lie in memory.
  template <typename Number>
  void is_followed_by(const Number* from, int64_t count) {
    next = reinterpret_cast<const char*>(from);
    next_bytes = count * sizeof(Number);
  }
};

template <int rows, int wide, bool few, typename X, typename Weight>
void tile(const Product<X>& the, int64_t row, int64_t column, const Weight* w) {
  float* y = the.y + row * the.y_row + column;
  const X* x = the.x + row * the.x_row;
  Lanes sums[rows][wide];
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < wide; ++j) sums[i][j] = the.fresh ? all(0.0f) : load(y + i * the.y_row + j * kLanes);
  for (int64_t k = 0; k < the.steps; ++k) {
    if constexpr (few) ask_for(the.next + k * the.next_step, wide * kLanes * sizeof(Weight));
    decltype(load(w)) weights[wide];
    for (int j = 0; j < wide; ++j) weights[j] = load(w + k * the.w_k + column + j * kLanes);
    for (int i = 0; i < rows; ++i) {
      const auto value = all(x[i * the.x_row + k * the.x_k]);
      for (int j = 0; j < wide; ++j) sums[i][j] = add_product(value, weights[j], sums[i][j]);
    }
  }
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < wide; ++j) store(y + i * the.y_row + j * kLanes, sums[i][j]);
}

template <int rows, typename X, typename Weight>
void strip(Product<X>& the, int64_t row, int64_t columns, const Weight* w) {
  constexpr int wide = rows <= 2 ? kFew : kMany;
  int64_t column = 0;
  for (; column + wide * kLanes <= columns; column += wide * kLanes) {
    if (the.few) {
      tile<rows, wide, true>(the, row, column, w);
    } else {  // not within the tile: there the compiler would keep the sums in memory
      ask_for(the.next, the.steps * the.next_step);
      tile<rows, wide, false>(the, row, column, w);
    }
    the.next += the.steps * the.next_step;
  }
  if (column == columns) return;
  // The columns left are too few for such a tile.
  ask_for(the.next, the.steps * the.next_step);
  the.next += the.steps * the.next_step;
  for (; column + 2 * kLanes <= columns; column += 2 * kLanes) tile<rows, 2, false>(the, row, column, w);
  for (; column < columns; column += kLanes) tile<rows, 1, false>(the, row, column, w);
}

// All rows and columns; `columns` are a multiple of kLanes.
template <typename X, typename Weight>
void multiply(Product<X>& the, int64_t rows, int64_t columns, const Weight* w) {
  // One vector of a row is few: more rows fit, and no sum waits.
  const int64_t tall = columns == kLanes ? rows / (2 * kRows) : 0;
  int64_t row = 0, left = (rows - tall * 2 * kRows + kRows - 1) / kRows;
  const int64_t wide = kLanes * (rows <= 2 ? kFew : kMany), tiles = (tall + left) * ((columns + wide - 1) / wide);
  the.next_step = (the.next_bytes + tiles * the.steps - 1) / (tiles * the.steps);
  for (; row < tall * 2 * kRows; row += 2 * kRows) strip<2 * kRows>(the, row, columns, w);
  for (; left > 0; --left) {
    const int64_t height = (rows - row + left - 1) / left;  // as equal as possible
    switch (height) {
      case 1: strip<1>(the, row, columns, w); break;
      case 2: strip<2>(the, row, columns, w); break;
      case 3: strip<3>(the, row, columns, w); break;
      case 4: strip<4>(the, row, columns, w); break;
      case 5: strip<5>(the, row, columns, w); break;
      default: strip<6>(the, row, columns, w);
    }
    row += height;
  }
}

template <typename X, typename Weight>
void multiply_panels(const X* x, int64_t rows, int64_t in, const Weight* weight, float* y, int64_t panels) {
  const int64_t out = panels * kPanel, depth = kNear / (kPanel * sizeof(Weight));
  torch::stable::parallel_for(0, panels, 1, [&](int64_t first, int64_t end) {
    for (int64_t number = first; number < end; ++number) {
      for (int64_t from = 0; from < in; from += depth) {
        const int64_t steps = std::min(depth, in - from);
        const Weight* block = weight + (number * in + from) * kPanel;
        const bool last = number + 1 == end && from + steps == in;  // asks for itself, which is in the cache
        Product<X> the{x + from, in, 1, steps, kPanel, y + number * kPanel, out, from == 0, rows <= kRows};
        the.is_followed_by(last ? block : block + steps * kPanel, steps * kPanel);
        multiply(the, rows, kPanel, block);
      }
    }
  });
}

// x float32 [rows, in], weight [panels, in, 64] -> float32 [rows, panels * 64].
// x bfloat16 [rows, in], weight bfloat16 [panels, in / 2, 64, 2] -> the same.
Tensor panel_linear(const Tensor& x, const Tensor& weight) {
  using torch::headeronly::ScalarType;
  const int64_t rows = x.size(0), panels = weight.size(0), pair = weight.dim() == 4 ? 2 : 1, in = x.size(1) / pair;
  STD_TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && in * pair == x.size(1) && in == weight.size(1));
  STD_TORCH_CHECK(weight.size(2) == kPanel);
  STD_TORCH_CHECK(x.scalar_type() == (pair == 2 ? ScalarType::BFloat16 : ScalarType::Float));
  Tensor y = torch::stable::new_empty(x, {rows, panels * kPanel}, ScalarType::Float);
  const void *from = x.data_ptr(), *weights = weight.data_ptr();
  auto* to = static_cast<float*>(y.data_ptr());
  const auto multiply_as = [&](const auto* x, const auto* weight) {
    multiply_panels(x, rows, in, weight, to, panels);
  };
  const auto* numbers = static_cast<const float*>(from);
  switch (weight.scalar_type()) {
    case ScalarType::Half: multiply_as(numbers, static_cast<const Half*>(weights)); break;
    case ScalarType::Float: multiply_as(numbers, static_cast<const float*>(weights)); break;
    case ScalarType::BFloat16:
      if (pair == 1) {
        multiply_as(numbers, static_cast<const BFloat*>(weights));
      } else {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
        multiply_as(static_cast<const Pair*>(from), static_cast<const Pair*>(weights));
#else
        STD_TORCH_CHECK(false, "this processor multiplies no pairs of bfloat16 numbers");
#endif
      }
      break;
    default: STD_TORCH_CHECK(false, "weights must be float32, float16 or bfloat16");
  }
  return y;
}

// exp(x) for x <= 0 within 2 units in the last place, and 0 below -87: Cephes' polynomial on |r| <= ln(2) / 2.
Lanes exponential(Lanes x) {
  const Lanes n = rounded(larger(x, all(-87.0f)) * all(1.44269504f));
  Lanes r = add_product(n, all(-0.693359375f), larger(x, all(-87.0f)));
  r = add_product(n, all(2.12194440e-4f), r);
  Lanes sum = all(1.9875691500e-4f);
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    sum = add_product(sum, r, all(factor));
  sum = add_product(sum, r * r, r + all(1.0f));
  return zero_below(x, -87.0f, times_power(sum, n));
}

constexpr int64_t kFewNodes = 2;
constexpr int64_t kFullNodes = 16;  // they fill vectors of each processor
constexpr int kTogether = 4;        // columns
constexpr float kNever = -std::numeric_limits<float>::max();

template <typename Number>
struct Head {
  const float* q;               // [nodes, width]
  const Number *keys, *values;  // [columns, width]
  const float* mask;            // [columns, nodes]
  float* out;                   // [nodes, width]
  int64_t nodes, width, columns;
  int64_t q_node;       // from one node to the next in q and out
  int64_t mask_column;  // from one column to the next in the mask
  float scale;
  const Number* next_keys;  // of the head after this one
  int64_t block;            // columns whose keys or values are used at a time
};

// The scores of `count` columns for one node: their sums do not wait for each other.
template <int count, typename Number>
void score(const Head<Number>& the, const float* q, int64_t column, int64_t node, float* scores) {
  const Number* keys = the.keys + column * the.width;
  const int64_t later = column + the.block, left = the.columns - later;
  const Number* next = left > 0 ? the.keys + later * the.width : the.values - left * the.width;
  Lanes sums[count];
  for (int i = 0; i < count; ++i) sums[i] = all(0.0f);
  for (int64_t k = 0; k < the.width; k += kLanes) {
    const Lanes factor = load(q + k);
    for (int i = 0; i < count; ++i) __builtin_prefetch(next + i * the.width + k);
    for (int i = 0; i < count; ++i) sums[i] = add_product(factor, load(keys + i * the.width + k), sums[i]);
  }
  for (int i = 0; i < count; ++i)
    scores[column + i] = sum_of(sums[i]) * the.scale + the.mask[(column + i) * the.mask_column + node];
}

// Sums of the values by the shares that the nodes give them, which lie at node * share_node + column * share_column.
template <typename Number>
void mix(const Head<Number>& the, const float* shares, int64_t share_node, int64_t share_column) {
  for (int64_t column = 0; column < the.columns; column += the.block) {
    const int64_t count = std::min(the.block, the.columns - column), next = column + count;
    const float* from = shares + column * share_column;
    Product<float> mixed{from, share_node, share_column, count, the.width, the.out, the.q_node, column == 0};
    const bool last = next == the.columns;
    mixed.is_followed_by(last ? the.next_keys : the.values + next * the.width, the.block * the.width);
    multiply(mixed, the.nodes, the.width, the.values + column * the.width);
  }
}

// Few nodes: the scores lie with the columns side by side, [nodes, lanes].
template <typename Number>
void attend_few(const Head<Number>& the, std::vector<float>& space) {
  const int64_t lanes = (the.columns + kLanes - 1) / kLanes * kLanes;
  space.assign(the.nodes * lanes, kNever);
  for (int64_t node = 0; node < the.nodes; ++node) {
    float *scores = space.data() + node * lanes, *end = scores + lanes;
    const float* q = the.q + node * the.q_node;
    int64_t column = 0;
    for (; column + kTogether <= the.columns; column += kTogether) score<kTogether, Number>(the, q, column, node, scores);
    for (; column < the.columns; ++column) score<1, Number>(the, q, column, node, scores);
    Lanes most = all(kNever), sum = all(0.0f);
    for (float* at = scores; at < end; at += kLanes) most = larger(most, load(at));
    most = all(largest_of(most));
    for (float* at = scores; at < end; at += kLanes) {
      const Lanes weight = exponential(load(at) - most);
      sum = sum + weight;
      store(at, weight);
    }
    const Lanes share = all(1.0f / sum_of(sum));
    for (float* at = scores; at < end; at += kLanes) store(at, load(at) * share);
  }
  mix(the, space.data(), lanes, 1);
}

// The numbers in float32; `space` holds them if they are narrow.
const float* widened(const float* from, int64_t, float*) { return from; }
const float* widened(const BFloat* from, int64_t count, float* space) {
  for (int64_t at = 0; at < count; at += kLanes) store(space + at, load(from + at));
  return space;
}

// Many nodes: the scores lie with the nodes side by side, [columns, lanes], and start as the mask.
template <typename Number>
void attend_many(const Head<Number>& the, std::vector<float>& space) {
  const int64_t lanes = (the.nodes + kLanes - 1) / kLanes * kLanes;
  space.resize((the.width + the.columns) * lanes + the.block * the.width);
  float *turned = space.data(), *scores = turned + the.width * lanes, *end = scores + the.columns * lanes;
  float* keys_space = end;
  std::fill(turned, end, 0.0f);
  for (int64_t node = 0; node < the.nodes; ++node)
    for (int64_t k = 0; k < the.width; ++k) turned[k * lanes + node] = the.q[node * the.q_node + k] * the.scale;
  for (int64_t column = 0; column < the.columns; ++column)
    std::copy_n(the.mask + column * the.mask_column, the.nodes, scores + column * lanes);
  for (int64_t column = 0; column < the.columns; column += the.block) {
    const int64_t count = std::min(the.block, the.columns - column), next = column + count;
    const float* keys = widened(the.keys + column * the.width, count * the.width, keys_space);
    Product<float> scored{keys, the.width, 1, the.width, lanes, scores + column * lanes, lanes, false};
    const bool last = next == the.columns;
    scored.is_followed_by(last ? the.values : the.keys + next * the.width, the.block * the.width);
    multiply(scored, count, lanes, const_cast<const float*>(turned));
  }
  for (int64_t lane = 0; lane < lanes; lane += kLanes) {
    Lanes most = all(kNever), sum = all(0.0f);
    for (float* at = scores + lane; at < end; at += lanes) most = larger(most, load(at));
    for (float* at = scores + lane; at < end; at += lanes) {
      const Lanes weight = exponential(load(at) - most);
      sum = sum + weight;
      store(at, weight);
    }
    const Lanes share = all(1.0f) / sum;
    for (float* at = scores + lane; at < end; at += lanes) store(at, load(at) * share);
  }
  mix(the, scores, 1, lanes);
}

// One node beside full vectors is attended alone: it would take as long as a vector of them.
template <typename Number>
void attend_nodes(Head<Number> the, std::vector<float>& space) {
  const int64_t few = the.nodes <= kFewNodes ? the.nodes : the.nodes % kFullNodes == 1;
  the.nodes -= few;
  if (the.nodes > 0) attend_many(the, space);
  if (few == 0) return;
  the.q += the.nodes * the.q_node;
  the.mask += the.nodes;
  the.out += the.nodes * the.q_node;
  the.nodes = few;
  attend_few(the, space);
}

// The number of columns without those at the end that no node sees, whose weights are 0.
int64_t seen_columns(const float* mask, int64_t columns, int64_t nodes) {
  const auto is_hidden = [](float added) { return added == -std::numeric_limits<float>::infinity(); };
  while (columns > 1 && std::all_of(mask + (columns - 1) * nodes, mask + columns * nodes, is_hidden)) --columns;
  return columns;
}

// q [rows, nodes, heads, width]; keys and values [rows, kv_heads, columns, width], contiguous but for their first two
// dimensions, both float32 or both bfloat16; the additive mask [rows, columns, nodes]. All else is float32; width is a
// multiple of 16.
Tensor node_attention(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& mask) {
  using torch::headeronly::ScalarType;
  const int64_t rows = q.size(0), nodes = q.size(1), heads = q.size(2), width = q.size(3), columns = keys.size(2);
  const int64_t together = heads / keys.size(1);
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));
  STD_TORCH_CHECK(q.is_contiguous() && mask.is_contiguous() && width % 16 == 0);
  for (const Tensor* one : {&keys, &values}) STD_TORCH_CHECK(one->stride(3) == 1 && one->stride(2) == width);
  for (const Tensor* one : {&q, &mask}) STD_TORCH_CHECK(one->scalar_type() == ScalarType::Float);
  const bool narrow = keys.scalar_type() == ScalarType::BFloat16;
  for (const Tensor* one : {&keys, &values})
    STD_TORCH_CHECK(one->scalar_type() == (narrow ? ScalarType::BFloat16 : ScalarType::Float));
  STD_TORCH_CHECK(mask.size(0) == rows && mask.size(1) == columns && mask.size(2) == nodes);
  Tensor out = torch::stable::new_empty(q, {rows, nodes, heads, width});
  const auto* masks = static_cast<const float*>(mask.data_ptr());
  const auto* asked = static_cast<const float*>(q.data_ptr());
  auto* made = static_cast<float*>(out.data_ptr());
  const int64_t key_row = keys.stride(0), key_head = keys.stride(1);
  const int64_t value_row = values.stride(0), value_head = values.stride(1);
  const auto attend = [&](const auto* every_key, const auto* every_value) {
    using Number = std::remove_const_t<std::remove_pointer_t<decltype(every_key)>>;
    const int64_t block = std::max<int64_t>(kNear / 2 / (width * sizeof(Number)), 1);  // scores are near, too
    torch::stable::parallel_for(0, rows * heads, 1, [&](int64_t first, int64_t end) {
      thread_local std::vector<float> space;
      for (int64_t at = first; at < end; ++at) {
        const int64_t row = at / heads, kv = at % heads / together;
        const int64_t next = std::min(at + 1, end - 1);  // the last is its own next one
        const float* seen = masks + row * columns * nodes;
        const int64_t visible = seen_columns(seen, columns, nodes);
        const int64_t corner = (row * nodes * heads + at % heads) * width;
        const Head<Number> the{asked + corner,
                               every_key + row * key_row + kv * key_head,
                               every_value + row * value_row + kv * value_head,
                               seen,
                               made + corner,
                               nodes,
                               width,
                               visible,
                               heads * width,
                               nodes,
                               scale,
                               every_key + next / heads * key_row + next % heads / together * key_head,
                               std::min(block, visible)};
        attend_nodes(the, space);
      }
    });
  };
  if (narrow) {
    attend(static_cast<const BFloat*>(keys.data_ptr()), static_cast<const BFloat*>(values.data_ptr()));
  } else {
    attend(static_cast<const float*>(keys.data_ptr()), static_cast<const float*>(values.data_ptr()));
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lantern_bench, CPU, library) {
  library.impl("panel_linear", TORCH_BOX(&panel_linear));
  library.impl("node_attention", TORCH_BOX(&node_attention));
}
