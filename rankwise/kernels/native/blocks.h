// Matrices of bfloat16 are cut into blocks of 32 x 32, which the processor's tiles (AMX) multiply.
//
// A block is 32 rows of 32 numbers: two tiles of 16 rows of 64 bytes, each a left operand of a tile product. A right
// operand has its rows in pairs: tile t, row p, column c holds the rows 2 p and 2 p + 1 of column 16 t + c.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

constexpr int64_t kSide = 32, kBlock = kSide * kSide, kTile = kBlock / 2;
constexpr int64_t kPackedBytes = 1 << 20;  // right operands fill half of the second-level cache

typedef uint16_t Half;

inline int64_t blocks_of(int64_t length) { return (length + kSide - 1) / kSide; }

struct Free {
  void operator()(Half* memory) const { ::operator delete[](memory, std::align_val_t(64)); }
};
typedef std::unique_ptr<Half[], Free> Halves;

inline Halves halves(int64_t count) { return Halves(new (std::align_val_t(64)) Half[count]); }

// A matrix as blocks, one row of blocks after another.
struct Blocks {
  Half* memory;
  int64_t rows, columns;

  Half* at(int64_t row, int64_t column) const { return memory + (row * columns + column) * kBlock; }
};

// Configures a thread's tiles for products, and releases them again: no function may expect another's configuration.
class Tiles {
 public:
  Tiles() {
    alignas(64) uint8_t shapes[64] = {1};
    for (int tile = 0; tile < 8; ++tile) {
      shapes[16 + 2 * tile] = 64;  // bytes of a row
      shapes[48 + tile] = 16;      // rows
    }
    _tile_loadconfig(shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

// sums (32 x 32) = sum over `depth` of left block times right block.
inline void multiply(const Half* left, const Half* right, int64_t depth, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (const Half* end = left + depth * kBlock; left != end; left += kBlock, right += kBlock) {
    // All loads come before the products, which would wait for them otherwise.
    _tile_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    _tile_loadd(7, right + kTile, 64);
    _tile_loadd(5, left + kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 16 * kSide, 128);
  _tile_stored(3, sums + 16 * kSide + 16, 128);
}

// Transposes 16 x 16 numbers of four bytes.
inline void transpose16(__m512i* rows) {
  __m512i turned[16];
  for (int row = 0; row < 16; row += 2) {
    turned[row] = _mm512_unpacklo_epi32(rows[row], rows[row + 1]);
    turned[row + 1] = _mm512_unpackhi_epi32(rows[row], rows[row + 1]);
  }
  for (int row = 0; row < 16; row += 4)
    for (int part = 0; part < 2; ++part) {
      rows[row + 2 * part] = _mm512_unpacklo_epi64(turned[row + part], turned[row + 2 + part]);
      rows[row + 2 * part + 1] = _mm512_unpackhi_epi64(turned[row + part], turned[row + 2 + part]);
    }
  for (int row = 0; row < 16; row += 8)
    for (int part = 0; part < 4; ++part) {
      turned[row + part] = _mm512_shuffle_i32x4(rows[row + part], rows[row + 4 + part], 0x88);
      turned[row + 4 + part] = _mm512_shuffle_i32x4(rows[row + part], rows[row + 4 + part], 0xdd);
    }
  for (int part = 0; part < 8; ++part) {
    rows[part] = _mm512_shuffle_i32x4(turned[part], turned[8 + part], 0x88);
    rows[8 + part] = _mm512_shuffle_i32x4(turned[part], turned[8 + part], 0xdd);
  }
}

// Makes a right operand of a block's transpose, or a block of a right operand: the function is its own inverse.
inline void turn(const Half* from, Half* to) {
  for (int tile = 0; tile < 2; ++tile) {
    __m512i rows[16];
    for (int row = 0; row < 16; ++row) rows[row] = _mm512_load_si512(from + tile * kTile + row * kSide);
    transpose16(rows);
    for (int row = 0; row < 16; ++row) _mm512_store_si512(to + tile * kTile + row * kSide, rows[row]);
  }
}

// Returns a mask of those of the 16 numbers from `start` on that a line of `length` has.
inline __mmask16 inside(int64_t start, int64_t length) {
  const int64_t left = length - start;
  return left >= 16 ? 0xffff : left <= 0 ? 0 : (1 << left) - 1;
}

// Makes a right operand of 32 x 32 numbers of a matrix that has `rows` x `columns` from there on; zeros lie beyond.
inline void pair_rows(const Half* from, int64_t stride, int64_t rows, int64_t columns, Half* to) {
  for (int pair = 0; pair < 16; ++pair)
    for (int tile = 0; tile < 2; ++tile) {
      const Half* first = from + 2 * pair * stride + 16 * tile;
      const __mmask16 known = inside(16 * tile, columns);
      const __m256i even = _mm256_maskz_loadu_epi16(2 * pair < rows ? known : 0, first);
      const __m256i odd = _mm256_maskz_loadu_epi16(2 * pair + 1 < rows ? known : 0, first + stride);
      const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16);
      _mm512_store_si512(to + tile * kTile + pair * kSide, _mm512_or_si512(_mm512_cvtepu16_epi32(even), high));
    }
}

// Makes a right operand of a block.
inline void pair_rows(const Half* from, Half* to) { pair_rows(from, kSide, kSide, kSide, to); }

inline void transpose_block(const Half* from, Half* to) {
  alignas(64) Half paired[kBlock];
  pair_rows(from, paired);
  turn(paired, to);
}

// These widen half a row of a block to floats, and round two halves to a row.
inline __m512 widen(const Half* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void round_to(Half* to, __m512 first, __m512 second) {
  _mm512_store_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
}

// Rounds 32 x 32 floats to a block.
inline void round_block(const float* values, Half* to) {
  for (int64_t line = 0; line < kBlock; line += kSide)
    round_to(to + line, _mm512_load_ps(values + line), _mm512_load_ps(values + line + 16));
}

// Multiplies left by right. `pack(block row, block column, to)` packs blocks of right into operands of tile products, a
// group of columns at a time that fits the cache. `finish(row, column, sums)` takes each block of the result. With
// `lower` only the blocks on and below the diagonal are made.
template <class Pack, class Finish>
void product(const Blocks& left, int64_t columns, bool lower, int threads, const Pack& pack, const Finish& finish) {
  const int64_t depth = left.columns, fitting = kPackedBytes / (depth * kBlock * int64_t(sizeof(Half)));
  const int64_t group = std::max<int64_t>(1, std::min(fitting, (columns + threads - 1) / threads));
  const int64_t groups = (columns + group - 1) / group;
#pragma omp parallel num_threads(threads)
  {
    const Tiles tiles;
    const Halves packed = halves(group * depth * kBlock);
    alignas(64) float sums[kBlock];
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < groups; ++index) {
      const int64_t start = index * group, end = std::min(columns, start + group);
      for (int64_t column = start; column < end; ++column)
        for (int64_t row = 0; row < depth; ++row)
          pack(row, column, packed.get() + ((column - start) * depth + row) * kBlock);
      for (int64_t row = lower ? start : 0; row < left.rows; ++row)
        for (int64_t column = start; column < (lower ? std::min(end, row + 1) : end); ++column) {
          multiply(left.at(row, 0), packed.get() + (column - start) * depth * kBlock, depth, sums);
          finish(row, column, sums);
        }
    }
  }
}
