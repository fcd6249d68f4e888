// Greedy and top-k on a GPU: a work-group a chunk of a row; keys in local memory, the boundary found by their digits.
//
// A source of its own, since what a CPU device never runs need not be compiled for it.
#include "topk.hpp"

constexpr int lanes_a_group = 256, digits = 256;

using Group = sycl::group<2>;

// True in every lane for the last group of a row. The counter orders lane 0 alone: what the other lanes wrote for other groups,
// and what they are to read of them, takes a barrier of the device's scope on either side.
inline bool last_group(const Lanes<lanes_a_group, 2> &lanes, uint32_t *arrived, int64_t row, int chunks) {
  Group group = lanes.item.get_group();
  sycl::group_barrier(group, sycl::memory_scope::device);
  uint32_t last = lanes.lane == 0 ? last_of(arrived, row, chunks) : 0;
  last = sycl::group_broadcast(group, last, 0);
  sycl::group_barrier(group, sycl::memory_scope::device);
  return last;
}

// ---------------------------------------------------------------- greedy

KERNEL(2) SUB_GROUP(16) void greedy_gpu(GREEDY_ARGS) {
  Lanes<lanes_a_group, 2> lanes;
  Group group = lanes.item.get_group();
  int64_t row = lanes.row(), c = lanes.column();
  uint64_t *mine = found + row * s.chunks, best = 0;
  with_row(logits, s, row, [&](auto *x) {
    for (int i = s.begin(c) + lanes.lane; i < s.end(c, s.columns); i += lanes_a_group) best = sycl::max(best, candidate(value_at(x, i), i));
  });
  best = sycl::reduce_over_group(group, best, sycl::maximum<uint64_t>());
  if (lanes.lane == 0) mine[c] = best;
  if (!last_group(lanes, arrived, row, s.chunks)) return;
  best = 0;
  for (int i = lanes.lane; i < s.chunks; i += lanes_a_group) best = sycl::max(best, mine[i]);
  best = sycl::reduce_over_group(group, best, sycl::maximum<uint64_t>());
  if (lanes.lane == 0) hand_over(best, row, slots, token, wide, next_input_ids);
}

// ---------------------------------------------------------------- select

// Which of n keys are the k largest: those above `key`, and of its equals the first `equals`. All that there are, where they are
// fewer than k: no key is 0.
struct Boundary {
  uint32_t key = 0;
  int equals = 0;
};

// Digit by digit from the highest: how many keys that begin like the boundary have each value of the next eight bits, and in which
// of them the k-th falls. `count` is local [256].
template <class Key> inline Boundary boundary_of(const Lanes<lanes_a_group, 2> &lanes, uint32_t *count, int n, int k, Key key_at) {
  Group group = lanes.item.get_group();
  int there = 0;
  for (int i = lanes.lane; i < n; i += lanes_a_group) there += key_at(i) != 0;
  if (sycl::reduce_over_group(group, there, sycl::plus<int>()) <= k) return {};
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    count[lanes.lane] = 0;
    lanes.barrier();
    for (int i = lanes.lane; i < n; i += lanes_a_group) {
      uint32_t key = key_at(i);
      if (key == 0 || (shift < 24 && key >> (shift + 8) != prefix)) continue;
      sycl::atomic_ref<uint32_t, sycl::memory_order::relaxed, sycl::memory_scope::work_group> bin(count[key >> shift & (digits - 1)]);
      bin.fetch_add(1);
    }
    lanes.barrier();
    // Lane 0 takes the highest digit, so that what is before a lane is above it.
    int digit = digits - 1 - lanes.lane, mine = int(count[digit]);
    int above = sycl::exclusive_scan_over_group(group, mine, sycl::plus<int>());
    bool holds = above < k && above + mine >= k;
    digit = sycl::reduce_over_group(group, holds ? digit : 0, sycl::maximum<int>());
    k -= sycl::reduce_over_group(group, holds ? above : 0, sycl::maximum<int>());
    prefix = prefix << 8 | uint32_t(digit);
  }
  return {prefix, k};
}

// What the boundary chooses, in the order of i: put(place, i). Returns how many.
template <class Key, class Put>
inline int compact(const Lanes<lanes_a_group, 2> &lanes, int n, Boundary boundary, Key key_at, Put put) {
  Group group = lanes.item.get_group();
  int taken = 0, equals = 0;
  for (int first = 0; first < n; first += lanes_a_group) {
    int i = first + lanes.lane;
    uint32_t key = i < n ? key_at(i) : 0;
    int equal = boundary.key && key == boundary.key;
    int before = equals + sycl::exclusive_scan_over_group(group, equal, sycl::plus<int>());
    int take = key > boundary.key || (equal && before < boundary.equals);
    int place = taken + sycl::exclusive_scan_over_group(group, take, sycl::plus<int>());
    if (take) put(place, i);
    equals += sycl::reduce_over_group(group, equal, sycl::plus<int>());
    taken += sycl::reduce_over_group(group, take, sycl::plus<int>());
  }
  return taken;
}

KERNEL(2) SUB_GROUP(16) void select_gpu(SELECT_ARGS, sycl::local_accessor<char, 1> memory) {
  Lanes<lanes_a_group, 2> lanes;
  int64_t row = lanes.row(), c = lanes.column();
  uint32_t *count = reinterpret_cast<uint32_t *>(&memory[0]), *keys = count + digits;
  uint64_t *all = found + row * s.chunks * s.kept, *mine = all + c * s.kept;
  int begin = s.begin(c), n = s.end(c, s.valid(seq_lens, row)) - begin;
  with_row(logits, s, row, [&](auto *x) {
    for (int i = lanes.lane; i < n; i += lanes_a_group) keys[i] = key_of(value_at(x, begin + i));
  });
  lanes.barrier();
  auto of_chunk = [=](int i) { return keys[i]; };
  Boundary boundary = boundary_of(lanes, count, n, s.kept, of_chunk);
  int taken = compact(lanes, n, boundary, of_chunk, [=](int place, int i) { mine[place] = uint64_t(keys[i]) << 32 | uint32_t(~(begin + i)); });
  for (int i = taken + lanes.lane; i < s.kept; i += lanes_a_group) mine[i] = 0;
  if (!last_group(lanes, arrived, row, s.chunks)) return;
  int32_t *out = indices + row * s.kept;
  auto of_row = [=](int i) { return key_in(all[i]); };
  n = s.chunks * s.kept;
  boundary = boundary_of(lanes, count, n, s.kept, of_row);
  taken = compact(lanes, n, boundary, of_row, [=](int place, int i) { out[place] = index_in(all[i]); });
  for (int i = taken + lanes.lane; i < s.kept; i += lanes_a_group) out[i] = -1;
}
