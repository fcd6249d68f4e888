// Probes of the memory ceilings: read, copy, change in place, and a launch of nothing. Sizes in 64-byte lines.
#include "common.hpp"

using Line = uint64_t __attribute__((ext_vector_type(8)));

// Each work-item sums its own run of lines; the sum is written so that no read can be left out.
KERNEL(1) void read_lines(const Line *from, uint64_t *sums, int64_t lines_per_item) {
  int64_t item = this_item::get_nd_item<1>().get_global_linear_id();
  const Line *p = from + item * lines_per_item;
  Line total = 0;
  for (int64_t i = 0; i < lines_per_item; i++) total += p[i];
  uint64_t sum = 0;
  for (int j = 0; j < 8; j++) sum += total[j];
  sums[item] = sum;
}

KERNEL(1) void copy_lines(const Line *from, Line *to, int64_t lines_per_item) {
  int64_t begin = this_item::get_nd_item<1>().get_global_linear_id() * lines_per_item;
  for (int64_t i = begin; i < begin + lines_per_item; i++) to[i] = from[i];
}

KERNEL(1) void change_lines(Line *in_place, int64_t lines_per_item) {
  int64_t begin = this_item::get_nd_item<1>().get_global_linear_id() * lines_per_item;
  for (int64_t i = begin; i < begin + lines_per_item; i++) in_place[i] = ~in_place[i];
}

KERNEL(1) void launch_nothing(uint64_t *unused) {
  if (this_item::get_nd_item<1>().get_global_linear_id() > 0) unused[0] = 0;
}
