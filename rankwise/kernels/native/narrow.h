// These functions encode and decode element states to the same bits as rankwise/kernels/quantization.py.
#pragma once

#include "tiles.h"

#include <cmath>
#include <cstring>
#include <type_traits>

constexpr int64_t kBlock = 64;
constexpr int kBroken = 127;

enum Kind { kBfloat16 = 0, kSigned = 1, kRoot = 2 };

// LowPrecisionRuns of rankwise/kernels/low_precision_runs.py; of keys and steps the lower 32 bits count.
struct NarrowRuns {
  int64_t kind, is_random, step;
  void* const* codes;
  int8_t* const* exponents;
  const int64_t *firsts, *keys;
};

template <int kKind>
using Code = std::conditional_t<kKind == kBfloat16, uint16_t, std::conditional_t<kKind == kSigned, int8_t, uint8_t>>;

template <int kKind>
struct Limits {
  static constexpr int kLeast = -126, kMost = 121, kPower = 7;
  static constexpr uint32_t kFull = 0x7e0000;
};
template <>
struct Limits<kRoot> {
  static constexpr int kLeast = -63, kMost = 52, kPower = 12;
  static constexpr uint32_t kFull = 0x7c0000;
};

// The blocks that a part of a run touches; it may begin and end within one.
struct Blocks {
  int64_t place, count, first, before, number;
  Blocks(const int64_t* firsts, int64_t run, int64_t start, int64_t count)
      : place(firsts[run] + start),
        count(count),
        first(place / kBlock - firsts[run] / kBlock),
        before(place % kBlock),
        number((before + count + kBlock - 1) / kBlock) {}
  int64_t begin(int64_t block) const { return std::max<int64_t>(block * kBlock - before, 0); }
  int64_t size(int64_t block) const { return std::min(count, (block + 1) * kBlock - before) - begin(block); }
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float power(int exponent) { return float_of(static_cast<uint32_t>(exponent + 127) << 23); }

inline uint32_t mixed(uint32_t word) {
  word = (word ^ (word >> 16)) * 0x7feb352du;
  word = (word ^ (word >> 15)) * 0x846ca68bu;
  return word ^ (word >> 16);
}

// The seed of a block's noise: all places of a block have the same upper 32 bits.
inline uint32_t seed_of(const NarrowRuns& runs, int64_t run, int64_t place) {
  const uint32_t count = mixed(static_cast<uint32_t>(runs.step) ^ mixed(static_cast<uint32_t>(runs.keys[run])));
  return mixed(static_cast<uint32_t>(static_cast<uint64_t>(place) >> 32) ^ count);
}

// Arguments are passed by value, because compilers make no vectors of references.
template <typename T>
inline T within(T value, T least, T most) {
  const T above = value < least ? least : value;
  return above > most ? most : above;
}

// A number up to 2^22 that is added to this is rounded to a whole one, halves to even. The bits of the sum, as an
// integer, are kZero plus that whole number.
constexpr float kWhole = 12582912.0f;
constexpr int32_t kZero = 0x4b400000;

// Returns kZero plus the whole number that a value is rounded to; `noise` has 16 bits behind the point.
template <bool kRandom>
inline int32_t rounded(float value, uint32_t noise) {
  if (!kRandom) return static_cast<int32_t>(bits_of(value + kWhole));
  const float sum = value + static_cast<float>(static_cast<int32_t>(noise)) * (1.0f / 65536), near = sum + kWhole;
  return static_cast<int32_t>(bits_of(near)) - static_cast<int32_t>(near - kWhole > sum);
}

// Rounds to bfloat16: up by noise, or to the nearest as torch does where a value is not finite or would not stay so.
template <bool kRandom>
inline uint16_t narrowed(float value, uint32_t noise) {
  const uint32_t bits = bits_of(value), near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, cut = bits + noise;
  const uint32_t nearest = value == value ? near : 0x7fc0;
  const bool is_finite = (bits & 0x7f800000) != 0x7f800000 && (cut & 0x7f800000) != 0x7f800000;
  return static_cast<uint16_t>(kRandom && is_finite ? cut >> 16 : nearest);
}

// Returns the bits of the largest magnitude; infinities and NaNs lie above all numbers.
inline uint32_t largest_of(const float* values, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i)
    largest = std::max(largest, static_cast<int32_t>(bits_of(values[i]) & 0x7fffffffu));
  return static_cast<uint32_t>(largest);
}

template <int kKind>
inline int exponent_of(uint32_t largest) {
  using Own = Limits<kKind>;
  if (largest >= 0x7f800000u) return kBroken;
  const int found = static_cast<int>(largest >> 23) - 126 - Own::kPower + ((largest & 0x7fffffu) > Own::kFull);
  return within<int>(found, Own::kLeast, Own::kMost);
}

inline __attribute__((always_inline)) void roots_of(const float* __restrict__ values, int64_t count,
                                                    float* __restrict__ roots) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) roots[i] = std::sqrt(values[i]);
}

template <int kKind, bool kRandom>
inline __attribute__((always_inline)) void encode(const float* __restrict__ roots, int64_t count, int exponent,
                                                  uint32_t seed, uint32_t place, Code<kKind>* __restrict__ codes) {
  const float scale = kKind == kBfloat16 ? 1.0f : power(-exponent);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t noise = kRandom ? mixed((place + static_cast<uint32_t>(i)) ^ seed) >> 16 : 0;
    if constexpr (kKind == kBfloat16) {
      codes[i] = narrowed<kRandom>(roots[i], noise);
    } else if constexpr (kKind == kSigned) {
      codes[i] = static_cast<int8_t>(within(rounded<kRandom>(roots[i] * scale, noise), kZero - 127, kZero + 127));
    } else {
      // A code has an exponent of its own and digits from 32 to 63, or fewer where that exponent is 0.
      const float scaled = roots[i] * scale;
      const int32_t shift = within(static_cast<int32_t>(bits_of(scaled) >> 23) - 132, 0, 6);
      const int32_t digits = within(rounded<kRandom>(scaled * power(-shift), noise), kZero, kZero + 64);
      codes[i] = scaled > 0.0f ? within(digits - kZero + 32 * shift, 1, 255) : 0;
    }
  }
}

template <int kKind>
inline __attribute__((always_inline)) void decode(const Code<kKind>* __restrict__ codes, int64_t count, int exponent,
                                                  float* __restrict__ values) {
  const float scale = exponent == kBroken ? std::nanf("") : power(exponent);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (kKind == kBfloat16) {
      values[i] = float_of(static_cast<uint32_t>(codes[i]) << 16);
    } else if constexpr (kKind == kSigned) {
      values[i] = static_cast<float>(codes[i]) * scale;
    } else {
      const int32_t code = codes[i], shift = within((code >> 5) - 1, 0, 6);
      const float root = static_cast<float>(code - 32 * shift) * power(shift) * scale;
      values[i] = root * root;
    }
  }
}

// So many blocks are encoded together: the processor works on some while it waits for others.
constexpr int64_t kTogether = 16;

template <int kKind>
inline void find_exponents(const Blocks& blocks, int64_t from, int64_t to, const float* roots, int8_t* exponents) {
  for (int64_t block = from; block < to; ++block) {
    const float* own = roots + blocks.begin(block) - blocks.begin(from);
    const int64_t size = blocks.size(block);
    exponents[block - from] = exponent_of<kKind>(size == kBlock ? largest_of(own, kBlock) : largest_of(own, size));
  }
}

// Whole blocks have a call of their own, whose constant size lets compilers unroll it.
template <int kKind, bool kRandom>
void keep(const NarrowRuns& runs, int64_t run, int64_t start, int64_t count, const float* values, const int8_t* given) {
  const Blocks blocks(runs.firsts, run, start, count);
  alignas(64) float space[kTogether * kBlock];
  for (int64_t from = 0; from < blocks.number; from += kTogether) {
    const int64_t to = std::min(from + kTogether, blocks.number), begin = blocks.begin(from);
    int8_t* exponents = kKind == kBfloat16 ? nullptr : runs.exponents[run] + blocks.first + from;
    const float* roots = values + begin;
    if (kKind == kRoot) {
      roots_of(roots, blocks.begin(to - 1) + blocks.size(to - 1) - begin, space);
      roots = space;
    }
    if (kKind != kBfloat16 && given) std::copy(given + blocks.first + from, given + blocks.first + to, exponents);
    if (kKind != kBfloat16 && !given) find_exponents<kKind>(blocks, from, to, roots, exponents);
    for (int64_t block = from; block < to; ++block) {
      const int64_t at = blocks.begin(block), size = blocks.size(block);
      const int exponent = kKind == kBfloat16 ? 0 : exponents[block - from];
      const uint32_t place = static_cast<uint32_t>(blocks.place + at);
      const uint32_t seed = kRandom ? seed_of(runs, run, blocks.place + at) : 0;
      const float* own = roots + at - begin;
      Code<kKind>* codes = static_cast<Code<kKind>*>(runs.codes[run]) + start + at;
      if (exponent == kBroken) {
        std::memset(codes, 0, size);
      } else if (size == kBlock) {
        encode<kKind, kRandom>(own, kBlock, exponent, seed, place, codes);
      } else {
        encode<kKind, kRandom>(own, size, exponent, seed, place, codes);
      }
    }
  }
}

template <int kKind>
void open(const NarrowRuns& runs, int64_t run, int64_t start, int64_t count, float* values) {
  const Blocks blocks(runs.firsts, run, start, count);
  for (int64_t block = 0; block < blocks.number; ++block) {
    const int64_t at = blocks.begin(block), size = blocks.size(block);
    const Code<kKind>* codes = static_cast<const Code<kKind>*>(runs.codes[run]) + start + at;
    const int exponent = kKind == kBfloat16 ? 0 : runs.exponents[run][blocks.first + block];
    size == kBlock ? decode<kKind>(codes, kBlock, exponent, values + at)
                   : decode<kKind>(codes, size, exponent, values + at);
  }
}

// Decodes a part of a run.
inline void open_codes(const NarrowRuns& runs, int64_t run, int64_t start, int64_t count, float* values) {
  const auto apply = runs.kind == kRoot ? open<kRoot> : runs.kind == kSigned ? open<kSigned> : open<kBfloat16>;
  apply(runs, run, start, count, values);
}

// Encodes a part of a run, which holds whole blocks but at the ends of the run; `given` has the exponents of the run.
inline void keep_codes(const NarrowRuns& runs, int64_t run, int64_t start, int64_t count, const float* values,
                       const int8_t* given = nullptr) {
  const bool random = runs.is_random;
  const auto apply = runs.kind == kRoot     ? random ? keep<kRoot, true> : keep<kRoot, false>
                     : runs.kind == kSigned ? random ? keep<kSigned, true> : keep<kSigned, false>
                     : random               ? keep<kBfloat16, true>
                                            : keep<kBfloat16, false>;
  apply(runs, run, start, count, values, given);
}

// Cuts runs into tiles that begin with blocks, but at the beginning of a run.
inline std::vector<Tile> tiles_of_blocks(int64_t count, const int64_t* lengths, const int64_t* firsts, int64_t size) {
  std::vector<int64_t> reach(count);
  for (int64_t run = 0; run < count; ++run) reach[run] = lengths[run] ? lengths[run] + firsts[run] % kBlock : 0;
  std::vector<Tile> tiles = tiles_of(count, reach.data(), size);
  for (Tile& tile : tiles) {
    const int64_t before = firsts[tile.run] % kBlock;
    tile.start = std::max<int64_t>(tile.start - before, 0);
    tile.end -= before;
  }
  return tiles;
}
