// Products of a matrix with a few columns, in which libraries are slow: the matrix is read once, at the speed of memory.
//
// Matrices are row-major and contiguous, ranks multiples of 16. Every element is a sum in one fixed order, whatever the
// tiles, so that it does not depend on the number of threads.
#pragma once

#include "vectors.h"

#include <algorithm>
#include <vector>

constexpr int kVectors = 3;  // of a tile; with eight operands the 24 sums and what they need fill the registers
constexpr int kOperands = 8;
constexpr int64_t kPanel = kVectors * kLanes;
constexpr int64_t kBlockRows = 16;  // of `left_product`: as many pages at a time, and as many to come
constexpr int kDotRows = 6, kDotColumns = 4;
constexpr int64_t kChunk = 512;  // columns of `right_product` whose operands stay in the first-level cache

inline int64_t panels_of(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

// to (columns, rows) = from (rows, columns), transposed.
inline void transpose(const float* from, int64_t rows, int64_t columns, float* to) {
  for (int64_t top = 0; top < rows; top += kLanes)
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t i = top; i < std::min(rows, top + kLanes); ++i) to[j * rows + i] = from[i * columns + j];
}

// --- left: basis^T matrix -------------------------------------------------------------------------------------------

// sums[k][v] += basis[i, k] * matrix[i, panel] for eight columns of the basis; `added` goes into the matrix first.
template <bool Full, bool Add>
inline void add_left(float* matrix, const float* added, int64_t stride, int64_t rows, int64_t columns,
                     const float* basis, int64_t rank, Vector* sums) {
  Vector sum[kOperands][kVectors];
#pragma GCC unroll 8
  for (int k = 0; k < kOperands; ++k)
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) sum[k][v] = sums[k * kVectors + v];
  for (int64_t i = 0; i < rows; ++i) {
    Vector row[kVectors];
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = i * stride + v * kLanes, count = Full ? kLanes : columns - v * kLanes;
      __builtin_prefetch(matrix + at + kBlockRows * stride, 0, 2);
      row[v] = Full ? load(matrix + at) : load_some(matrix + at, count);
      if (Add) {
        __builtin_prefetch(added + at + kBlockRows * stride, 0, 2);
        row[v] += Full ? load(added + at) : load_some(added + at, count);
        if (Full) store(matrix + at, row[v]); else store_some(matrix + at, row[v], count);
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < kOperands; ++k) {
      const Vector factor = broadcast(basis[i * rank + k]);
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) sum[k][v] += row[v] * factor;
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < kOperands; ++k)
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) sums[k * kVectors + v] = sum[k][v];
}

// out (rank, columns) = basis^T matrix; basis (rows, rank). `added`, if any, goes into the matrix first.
inline void left_product(float* matrix, const float* added, int64_t rows, int64_t columns, const float* basis,
                         int64_t rank, float* out, int threads) {
  const int64_t panels = panels_of(columns);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t part = 0; part < threads; ++part) {
    const int64_t first = panels * part / threads, last = panels * (part + 1) / threads;
    // Contiguous: rows of `out` are often a multiple of 4 KiB apart and would evict each other.
    std::vector<Vector> sums((last - first) * rank * kVectors);
    for (int64_t top = 0; top < rows; top += kBlockRows) {
      const int64_t count = std::min(kBlockRows, rows - top);
      for (int64_t panel = first; panel < last; ++panel) {
        const int64_t left_over = columns - panel * kPanel, corner = top * columns + panel * kPanel;
        const bool full = left_over >= kPanel;
        for (int64_t k = 0; k < rank; k += kOperands) {
          const bool add = added && k == 0;
          const auto apply = full ? add ? add_left<true, true> : add_left<true, false>
                                  : add ? add_left<false, true> : add_left<false, false>;
          apply(matrix + corner, added ? added + corner : nullptr, columns, count, left_over, basis + top * rank + k, rank,
                &sums[((panel - first) * rank + k) * kVectors]);
        }
      }
    }
    for (int64_t k = 0; k < rank; ++k)
      for (int64_t panel = first; panel < last; ++panel)
        for (int v = 0; v < kVectors; ++v) {
          const int64_t start = panel * kPanel + v * kLanes;
          store_some(out + k * columns + start, sums[((panel - first) * rank + k) * kVectors + v], columns - start);
        }
  }
}

// --- right: basis matrix^T ------------------------------------------------------------------------------------------

// sums[i][k] += matrix[i, chunk] * basis[k, chunk], lane by lane, for four rows of the basis; `basis` is packed.
template <int Rows>
inline void add_dots(const float* matrix, int64_t stride, int64_t columns, const float* basis, int64_t rank,
                     Vector* sums) {
  Vector sum[Rows][kDotColumns];
#pragma GCC unroll 6
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int k = 0; k < kDotColumns; ++k) sum[i][k] = sums[i * rank + k];
  for (int64_t j = 0; j < columns; j += kLanes, basis += rank * kLanes) {
    Vector row[Rows];
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) row[i] = load_some(matrix + i * stride + j, columns - j);
#pragma GCC unroll 4
    for (int k = 0; k < kDotColumns; ++k) {
      const Vector factor = load(basis + k * kLanes);
#pragma GCC unroll 6
      for (int i = 0; i < Rows; ++i) sum[i][k] += row[i] * factor;
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int k = 0; k < kDotColumns; ++k) sums[i * rank + k] = sum[i][k];
}

// Lane k is the sum of the lanes of sums[k].
inline Vector lane_sums(const Vector* sums) {
  Vector eight[8], four[4], two[2];
  for (int i = 0; i < 8; ++i) {
    const Vector a = sums[2 * i], b = sums[2 * i + 1];
    eight[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
               __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
  for (int i = 0; i < 4; ++i) {
    const Vector a = eight[2 * i], b = eight[2 * i + 1];
    four[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
              __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  for (int i = 0; i < 2; ++i) {
    const Vector a = four[2 * i], b = four[2 * i + 1];
    two[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
             __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  return __builtin_shufflevector(two[0], two[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(two[0], two[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

template <int Rows>
void right_rows(float* matrix, const float* added, int64_t columns, const float* packed, int64_t rank, Vector* sums,
                float* out, int64_t out_stride) {
  std::fill(sums, sums + Rows * rank, Vector{});
  for (int64_t start = 0; start < columns; start += kChunk) {
    const int64_t count = std::min(kChunk, columns - start);
    for (int i = 0; i < Rows; ++i) {
      float* row = matrix + i * columns + start;
      for (int64_t j = 0; j < count; j += kLanes) __builtin_prefetch(row + Rows * columns + j, 0, 2);
      if (!added) continue;
      const float* other = added + i * columns + start;
      for (int64_t j = 0; j < count; j += kLanes) {
        __builtin_prefetch(other + Rows * columns + j, 0, 2);
        store_some(row + j, load_some(row + j, count - j) + load_some(other + j, count - j), count - j);
      }
    }
    for (int64_t k = 0; k < rank; k += kDotColumns)
      add_dots<Rows>(matrix + start, columns, count, packed + start * rank + k * kLanes, rank, sums + k);
  }
  for (int i = 0; i < Rows; ++i)
    for (int64_t k = 0; k < rank; k += kLanes) {
      const Vector found = lane_sums(sums + i * rank + k);
      for (int lane = 0; lane < kLanes; ++lane) out[(k + lane) * out_stride + i] = found[lane];
    }
}

// out (rank, rows) = basis matrix^T; basis (rank, columns). `added`, if any, goes into the matrix first.
inline void right_product(float* matrix, const float* added, int64_t rows, int64_t columns, const float* basis,
                          int64_t rank, float* out, int threads) {
  const int64_t blocks = (rows + kDotRows - 1) / kDotRows, vectors = (columns + kLanes - 1) / kLanes;
  std::vector<Vector> packed(vectors * rank);
  for (int64_t j = 0; j < vectors; ++j)
    for (int64_t k = 0; k < rank; ++k)
      packed[j * rank + k] = load_some(basis + k * columns + j * kLanes, columns - j * kLanes);
  const float* operand = reinterpret_cast<const float*>(packed.data());
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<Vector> sums(kDotRows * rank);
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t top = block * kDotRows, count = std::min<int64_t>(kDotRows, rows - top);
      const int64_t step = count == kDotRows ? kDotRows : 1;
      const auto apply = count == kDotRows ? right_rows<kDotRows> : right_rows<1>;
      for (int64_t i = top; i < top + count; i += step)
        apply(matrix + i * columns, added ? added + i * columns : nullptr, columns, operand, rank, sums.data(),
              out + i, rows);
    }
  }
}

// --- the way back: matrix -= left right -----------------------------------------------------------------------------

// matrix[i, panel] -= left[i, :] right[:, panel] for Rows rows; `right` is packed.
template <int Rows, bool Full>
inline void subtract_rows(float* matrix, int64_t stride, int64_t columns, const float* left, int64_t rank,
                          const float* right) {
  Vector value[Rows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      const float* at = matrix + i * stride + v * kLanes;
      __builtin_prefetch(at + Rows * stride, 1, 2);
      value[i][v] = Full ? load(at) : load_some(at, columns - v * kLanes);
    }
  for (int64_t k = 0; k < rank; ++k) {
    Vector operand[kVectors];
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) operand[v] = load(right + k * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const Vector factor = broadcast(left[i * rank + k]);
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) value[i][v] -= operand[v] * factor;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      float* at = matrix + i * stride + v * kLanes;
      if (Full) store(at, value[i][v]); else store_some(at, value[i][v], columns - v * kLanes);
    }
}

template <bool Full>
inline void subtract_block(float* matrix, int64_t stride, int64_t rows, int64_t columns, const float* left,
                           int64_t rank, const float* right) {
  if (rows == kOperands) return subtract_rows<kOperands, Full>(matrix, stride, columns, left, rank, right);
  for (int64_t i = 0; i < rows; ++i)
    subtract_rows<1, Full>(matrix + i * stride, stride, columns, left + i * rank, rank, right);
}

// matrix -= left right; left (rows, rank), right (rank, columns).
inline void subtract_product(float* matrix, int64_t rows, int64_t columns, const float* left, int64_t rank,
                             const float* right, int threads) {
  const int64_t panels = panels_of(columns), blocks = (rows + kOperands - 1) / kOperands;
  std::vector<Vector> packed(panels * rank * kVectors);
  for (int64_t panel = 0; panel < panels; ++panel)
    for (int64_t k = 0; k < rank; ++k)
      for (int v = 0; v < kVectors; ++v) {
        const int64_t start = panel * kPanel + v * kLanes;
        packed[(panel * rank + k) * kVectors + v] = load_some(right + k * columns + start, columns - start);
      }
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t top = block * kOperands, count = std::min<int64_t>(kOperands, rows - top);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t left_over = columns - panel * kPanel;
      float* to = matrix + top * columns + panel * kPanel;
      const float* operand = reinterpret_cast<const float*>(&packed[panel * rank * kVectors]);
      const auto apply = left_over >= kPanel ? subtract_block<true> : subtract_block<false>;
      apply(to, columns, count, left_over, left + top * rank, rank, operand);
    }
  }
}
