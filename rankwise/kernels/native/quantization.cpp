// These functions encode and decode many runs in one pass through memory, as rankwise/kernels/quantization.py says.

#include "narrow.h"

namespace {

// Runs as Python describes them; `bases` says where the exponents of each run begin among those of all runs.
struct Runs {
  NarrowRuns kept;
  int64_t count, tile, threads;
  const int64_t *lengths, *bases;
};

template <typename Work>
void in_tiles(const Runs& runs, Work work) {
  const auto tiles = tiles_of_blocks(runs.count, runs.lengths, runs.kept.firsts, runs.tile);
#pragma omp parallel for num_threads(runs.threads) schedule(static)
  for (size_t index = 0; index < tiles.size(); ++index)
    work(tiles[index].run, tiles[index].start, tiles[index].end - tiles[index].start);
}

template <int kKind>
void find_exponents_of(const Blocks& blocks, const float* values, int8_t* exponents) {
  alignas(64) float space[kTogether * kBlock];
  for (int64_t from = 0; from < blocks.number; from += kTogether) {
    const int64_t to = std::min(from + kTogether, blocks.number), begin = blocks.begin(from);
    if (kKind == kRoot) roots_of(values + begin, blocks.begin(to - 1) + blocks.size(to - 1) - begin, space);
    find_exponents<kKind>(blocks, from, to, kKind == kRoot ? space : values + begin, exponents + from);
  }
}

}  // namespace

extern "C" {

void decode_runs(const Runs* runs, float* const* values) {
  in_tiles(*runs, [=](int64_t run, int64_t start, int64_t count) {
    open_codes(runs->kept, run, start, count, values[run] + start);
  });
}

void add_decoded_runs(const Runs* runs, const float* const* values, float* const* sums) {
  in_tiles(*runs, [=](int64_t run, int64_t start, int64_t count) {
    alignas(64) float opened[kBlock];
    for (int64_t done = start; done < start + count; done += kBlock) {
      const int64_t part = std::min(kBlock, start + count - done);
      open_codes(runs->kept, run, done, part, opened);
      for (int64_t i = 0; i < part; ++i) sums[run][done + i] = values[run][done + i] + opened[i];
    }
  });
}

void exponents_of_runs(const Runs* runs, const float* const* values, int8_t* exponents) {
  const auto find = runs->kept.kind == kRoot ? find_exponents_of<kRoot> : find_exponents_of<kSigned>;
  in_tiles(*runs, [=](int64_t run, int64_t start, int64_t count) {
    const Blocks blocks(runs->kept.firsts, run, start, count);
    find(blocks, values[run] + start, exponents + runs->bases[run] + blocks.first);
  });
}

// Encodes runs with the given exponents, or those of the values where `exponents` is null.
void encode_runs(const Runs* runs, const float* const* values, const int8_t* exponents) {
  in_tiles(*runs, [=](int64_t run, int64_t start, int64_t count) {
    const int8_t* given = exponents ? exponents + runs->bases[run] : nullptr;
    keep_codes(runs->kept, run, start, count, values[run] + start, given);
  });
}
}
