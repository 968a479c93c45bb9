// MKOR multiplies a gradient by its factor inverses from both sides, with products in bfloat16 and sums in float32.
#pragma once

#include "blocks.h"

#include <cmath>
#include <numeric>
#include <vector>

// The gradients of a weight and of its bias, which is the last column of the matrix or its last row.
struct Gradient {
  int64_t rows, columns;  // of the weight
  int64_t turned;         // the bias is a row
  const float* weight;
  const float* bias;      // null: none
};

class Preconditioning {
 public:
  // `memory` holds the matrix twice, in whole blocks.
  Preconditioning(const Gradient& gradient, Half* memory, int threads)
      : own_(gradient), threads_(threads), rows_(own_.rows + (own_.bias && own_.turned)),
        columns_(own_.columns + (own_.bias && !own_.turned)), tall_(blocks_of(rows_)), wide_(blocks_of(columns_)),
        first_(memory), second_(memory + tall_ * wide_ * kBlock), before_(tall_ * wide_), after_(tall_ * wide_) {}

  // left (rows x rows) and right (columns x columns) are symmetric; null stands for the identity.
  void run(const Half* left, const Half* right, bool rescale, float* weight, float* bias) {
    const Blocks matrix{first_, tall_, wide_}, result{second_, tall_, wide_};
    if (left) {
      const Blocks turned{first_, wide_, tall_};
      read([&](int64_t row, int64_t column, const Half* block) { transpose_block(block, turned.at(column, row)); });
      multiply_by(left, rows_, turned, [&](int64_t row, int64_t column, const Half* block) {
        transpose_block(block, result.at(column, row));
        if (!right) after_[column * wide_ + row] = squares(block);
      });
    } else {
      read([&](int64_t row, int64_t column, const Half* block) {
        std::memcpy(result.at(row, column), block, kBlock * sizeof(Half));
      });
    }
    if (right)
      multiply_by(right, columns_, result, [&](int64_t row, int64_t column, const Half* block) {
        std::memcpy(matrix.at(row, column), block, kBlock * sizeof(Half));
        after_[row * wide_ + column] = squares(block);
      });
    write(right ? matrix : result, rescale, weight, bias);
  }

 private:
  // Multiplies `from` by a symmetric factor; `take` gets the rounded blocks of the product.
  template <class Take>
  void multiply_by(const Half* factor, int64_t size, const Blocks& from, const Take& take) const {
    product(
        from, blocks_of(size), false, threads_,
        [&](int64_t row, int64_t column, Half* to) {
          const Half* start = factor + row * kSide * size + column * kSide;
          pair_rows(start, size, size - row * kSide, size - column * kSide, to);
        },
        [&](int64_t row, int64_t column, const float* sums) {
          alignas(64) Half block[kBlock];
          round_block(sums, block);
          take(row, column, block);
        });
  }

  template <class Take>
  void read(const Take& take) {
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (int64_t row = 0; row < tall_; ++row)
      for (int64_t column = 0; column < wide_; ++column) {
        alignas(64) float found[kBlock];
        alignas(64) Half block[kBlock];
        for (int64_t line = 0; line < kSide; ++line) read_line(row * kSide + line, column, found + line * kSide);
        round_block(found, block);
        before_[row * wide_ + column] = squares(found);
        take(row, column, block);
      }
  }

  bool has_column(int64_t column) const { return own_.bias && !own_.turned && column == own_.columns / kSide; }

  void read_line(int64_t row, int64_t column, float* to) const {
    const bool in_weight = row < own_.rows;
    const float* from = (in_weight ? own_.weight + row * own_.columns : own_.bias) + column * kSide;
    const int64_t length = row < rows_ ? own_.columns : 0;
    _mm512_store_ps(to, _mm512_maskz_loadu_ps(inside(column * kSide, length), from));
    _mm512_store_ps(to + 16, _mm512_maskz_loadu_ps(inside(column * kSide + 16, length), from + 16));
    if (in_weight && has_column(column)) to[own_.columns % kSide] = own_.bias[row];
  }

  static double squares(const float* values) {
    __m512d sum = _mm512_setzero_pd();
    for (int64_t place = 0; place < kBlock; place += 8) {
      const __m512d wide = _mm512_cvtps_pd(_mm256_load_ps(values + place));
      sum = _mm512_fmadd_pd(wide, wide, sum);
    }
    return _mm512_reduce_add_pd(sum);
  }

  static double squares(const Half* block) {
    alignas(64) float wide[kBlock];
    for (int64_t place = 0; place < kBlock; place += 16) _mm512_store_ps(wide + place, widen(block + place));
    return squares(wide);
  }

  // Squares are added block by block in order, so that the norm does not depend on the threads.
  static double norm(const std::vector<double>& squares) {
    return std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
  }

  // Writes the result with the norm of the gradient, or the gradient itself where the result's norm is 0 or not finite.
  void write(const Blocks& result, bool rescale, float* weight, float* bias) const {
    const double before = norm(before_), after = norm(after_);
    const bool usable = !rescale || (after > 0.0 && std::isfinite(after));
    const __m512 scale = _mm512_set1_ps(rescale && usable ? float(before / after) : 1.0f);
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (int64_t row = 0; row < tall_; ++row)
      for (int64_t column = 0; column < wide_; ++column)
        for (int64_t line = 0; line < std::min(kSide, rows_ - row * kSide); ++line) {
          alignas(64) float values[kSide];
          if (usable) {
            const Half* from = result.at(row, column) + line * kSide;
            _mm512_store_ps(values, _mm512_mul_ps(widen(from), scale));
            _mm512_store_ps(values + 16, _mm512_mul_ps(widen(from + 16), scale));
          } else {
            read_line(row * kSide + line, column, values);
          }
          write_line(row * kSide + line, column, values, weight, bias);
        }
  }

  void write_line(int64_t row, int64_t column, const float* values, float* weight, float* bias) const {
    const bool in_weight = row < own_.rows;
    float* to = (in_weight ? weight + row * own_.columns : bias) + column * kSide;
    _mm512_mask_storeu_ps(to, inside(column * kSide, own_.columns), _mm512_load_ps(values));
    _mm512_mask_storeu_ps(to + 16, inside(column * kSide + 16, own_.columns), _mm512_load_ps(values + 16));
    if (in_weight && has_column(column)) bias[row] = values[own_.columns % kSide];
  }

  const Gradient& own_;
  const int threads_;
  const int64_t rows_, columns_, tall_, wide_;  // of the whole matrix, in numbers and in blocks
  Half *const first_, *const second_;
  std::vector<double> before_, after_;  // squared norms of the blocks
};
