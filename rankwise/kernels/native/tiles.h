// Runs of memory are cut into tiles: a thread takes a tile at a time, and sums over tiles do not depend on the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

struct Tile {
  int64_t run, start, end;
};

inline std::vector<Tile> tiles_of(int64_t runs, const int64_t* lengths, int64_t size) {
  std::vector<Tile> tiles;
  for (int64_t run = 0; run < runs; ++run)
    for (int64_t start = 0; start < lengths[run]; start += size)
      tiles.push_back({run, start, std::min(lengths[run], start + size)});
  return tiles;
}

// Adds the part of each tile to the sum of its run, in order.
inline void add_up(const std::vector<Tile>& tiles, const std::vector<double>& parts, int64_t runs, double* sums) {
  std::fill(sums, sums + runs, 0.0);
  for (size_t index = 0; index < tiles.size(); ++index) sums[tiles[index].run] += parts[index];
}
