// Block-wise quantization to 8 bits, see rankwise/kernels/quantization.py, one pass through memory.

#include "tiles.h"

#include <cmath>
#include <cstring>

namespace {

constexpr int64_t kBlock = 64;
constexpr int kLeast = -126, kMost = 126;

inline float power(int exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Of the largest magnitude's bits: the least exponent by whose power 127 reaches it.
inline int exponent_of(uint32_t bits) {
  if (bits >= 0x7f800000u) return kMost + 1;
  const int found = static_cast<int>(bits >> 23) - 126 - 7 + ((bits & 0x7fffffu) > 0x7e0000u);
  return std::min(std::max(found, kLeast), kMost + 1);
}

inline void quantize(const float* __restrict__ values, int64_t count, int8_t* __restrict__ codes, int8_t* exponent) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  const int found = exponent_of(largest);
  *exponent = static_cast<int8_t>(found);
  if (found > kMost) {
    std::memset(codes, 0, count);
    return;
  }
  const float scale = power(-found);
  // Added and taken away, this leaves no digits behind the point: rounded to the nearest, halves to even.
  const float whole = 12582912.0f;
  for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<int8_t>(static_cast<int32_t>(values[i] * scale + whole - whole));
}

inline void add(const float* values, int64_t count, const int8_t* __restrict__ codes, int8_t exponent, float* sums) {
  const float scale = exponent > kMost ? std::nanf("") : power(exponent);
  for (int64_t i = 0; i < count; ++i) sums[i] = values[i] + static_cast<float>(codes[i]) * scale;
}

template <typename Work>
void in_blocks(int64_t runs, const int64_t* lengths, int64_t tile, int threads, Work work) {
  const std::vector<Tile> tiles = tiles_of(runs, lengths, tile);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (size_t index = 0; index < tiles.size(); ++index)
    for (int64_t first = tiles[index].start; first < tiles[index].end; first += kBlock)
      work(tiles[index].run, first, std::min(kBlock, tiles[index].end - first));
}

}  // namespace

extern "C" {

// The tile is a multiple of a block.
void quantize_runs(int64_t runs, const int64_t* lengths, int64_t tile, int threads, const float* const* values,
                   int8_t* const* quantized) {
  in_blocks(runs, lengths, tile, threads, [=](int64_t run, int64_t first, int64_t count) {
    quantize(values[run] + first, count, quantized[run] + first, quantized[run] + lengths[run] + first / kBlock);
  });
}

void add_dequantized_runs(int64_t runs, const int64_t* lengths, int64_t tile, int threads, const float* const* values,
                          const int8_t* const* quantized, float* const* sums) {
  in_blocks(runs, lengths, tile, threads, [=](int64_t run, int64_t first, int64_t count) {
    const int8_t exponent = quantized[run][lengths[run] + first / kBlock];
    add(values[run] + first, count, quantized[run] + first, exponent, sums[run] + first);
  });
}
}
