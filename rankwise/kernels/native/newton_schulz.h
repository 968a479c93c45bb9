// Newton-Schulz iterations have products in bfloat16 and sums in float32, and compute half of both symmetric products.
#pragma once

#include "blocks.h"

// The coefficients of one step's polynomial.
struct Rates {
  float linear, cubic, quintic;
};

// One matrix, and where its orthogonal factor goes.
struct Orthogonal {
  int64_t rows, columns;
  const float* from;
  double divisor;  // what the matrix is divided by before the first step
  float* to;
  int64_t moves;   // 0: `to` becomes the orthogonal factor; 1: `to` loses lr * factor times it
  double factor, lr;
};

class NewtonSchulz {
 public:
  NewtonSchulz(const Orthogonal& own, Half* memory, int threads)
      : own_(own), rows_(own.rows), columns_(own.columns), tall_(rows_ > columns_), threads_(threads),
        short_(blocks_of(std::min(rows_, columns_))), long_(blocks_of(std::max(rows_, columns_))),
        x_{memory, short_, long_}, gram_{x_.at(short_, 0), short_, short_},
        polynomial_{gram_.at(short_, 0), short_, short_} {}

  // How many numbers the memory of a matrix must hold.
  static int64_t needs(const Orthogonal& own) {
    const int64_t rows = blocks_of(own.rows), columns = blocks_of(own.columns);
    return (rows * columns + 2 * std::min(rows, columns) * std::min(rows, columns)) * kBlock;
  }

  void run(int64_t steps, const Rates* rates) {
    read();
    for (int64_t step = 0; step < steps; ++step) {
      square();
      combine(rates[step]);
      advance(rates[step].linear);
    }
    write();
  }

 private:
  // gram = x x^T.
  void square() {
    product(
        x_, short_, true, threads_,
        [&](int64_t row, int64_t column, Half* to) { turn(x_.at(column, row), to); },
        [&](int64_t row, int64_t column, const float* sums) {
          round_block(sums, gram_.at(row, column));
          if (row != column) transpose_block(gram_.at(row, column), gram_.at(column, row));
        });
  }

  // polynomial = b gram + c gram gram.
  void combine(const Rates& rates) {
    const __m512 cubic = _mm512_set1_ps(rates.cubic), quintic = _mm512_set1_ps(rates.quintic);
    product(
        gram_, short_, true, threads_,
        [&](int64_t row, int64_t column, Half* to) { turn(gram_.at(column, row), to); },
        [&](int64_t row, int64_t column, const float* sums) {
          add_scaled(gram_.at(row, column), cubic, sums, quintic, polynomial_.at(row, column));
          if (row != column) transpose_block(polynomial_.at(row, column), polynomial_.at(column, row));
        });
  }

  // x = a x + polynomial x. It may be in place because a column of blocks is packed before its first block changes.
  void advance(float linear) {
    const __m512 own = _mm512_set1_ps(linear), one = _mm512_set1_ps(1.0f);
    product(
        polynomial_, long_, false, threads_,
        [&](int64_t row, int64_t column, Half* to) { pair_rows(x_.at(row, column), to); },
        [&](int64_t row, int64_t column, const float* sums) {
          add_scaled(x_.at(row, column), own, sums, one, x_.at(row, column));
        });
  }

  // to = p block + q sums, rounded once.
  static void add_scaled(const Half* block, __m512 p, const float* sums, __m512 q, Half* to) {
    for (int64_t line = 0; line < kBlock; line += kSide) {
      const __m512 first = _mm512_mul_ps(q, _mm512_load_ps(sums + line));
      const __m512 second = _mm512_mul_ps(q, _mm512_load_ps(sums + line + 16));
      round_to(to + line, _mm512_fmadd_ps(p, widen(block + line), first),
               _mm512_fmadd_ps(p, widen(block + line + 16), second));
    }
  }

  // Reads the matrix as blocks, with zeros beyond its edge.
  void read() {
    const __m512 divisors = _mm512_set1_ps(float(own_.divisor));
    over_blocks([&](int64_t row, int64_t column, Half* block) {
      alignas(64) Half found[kBlock];
      Half* const to = tall_ ? found : block;
      for (int64_t line = 0; line < kSide; ++line) {
        const float* start = own_.from + (row * kSide + line) * columns_ + column * kSide;
        const int64_t length = row * kSide + line < rows_ ? columns_ : 0;
        const __m512 first = _mm512_maskz_loadu_ps(inside(column * kSide, length), start);
        const __m512 second = _mm512_maskz_loadu_ps(inside(column * kSide + 16, length), start + 16);
        round_to(to + line * kSide, _mm512_div_ps(first, divisors), _mm512_div_ps(second, divisors));
      }
      if (tall_) transpose_block(found, block);
    });
  }

  void write() const {
    over_blocks([&](int64_t row, int64_t column, const Half* block) {
      alignas(64) Half turned[kBlock];
      if (tall_) transpose_block(block, turned);
      const Half* const found = tall_ ? turned : block;
      for (int64_t line = 0; line < std::min(kSide, rows_ - row * kSide); ++line)
        for (int64_t half = 0; half < kSide; half += 16) {
          float* start = own_.to + (row * kSide + line) * columns_ + column * kSide + half;
          const __mmask16 known = inside(column * kSide + half, columns_);
          _mm512_mask_storeu_ps(start, known, changed(start, known, widen(found + line * kSide + half)));
        }
    });
  }

  __m512 changed(const float* before, __mmask16 known, __m512 result) const {
    if (!own_.moves) return result;
    const __m512 direction = _mm512_mul_ps(result, _mm512_set1_ps(float(own_.factor)));
    return _mm512_fnmadd_ps(_mm512_set1_ps(float(own_.lr)), direction, _mm512_maskz_loadu_ps(known, before));
  }

  template <class Visit>
  void over_blocks(const Visit& visit) const {
    const int64_t rows = tall_ ? long_ : short_, columns = tall_ ? short_ : long_;
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t column = 0; column < columns; ++column)
        visit(row, column, tall_ ? x_.at(column, row) : x_.at(row, column));
  }

  const Orthogonal& own_;
  const int64_t rows_, columns_;
  const bool tall_;
  const int threads_;
  const int64_t short_, long_;
  const Blocks x_, gram_, polynomial_;
};
