// What selection shares: keys in the order of the logits, and how groups of one row find the last among them.
//
// A candidate is 64 bits, its key above the complement of an index: of equal keys the larger has the lower index, no two are equal,
// and 0 is none. So a maximum and a selection of candidates are unique, whatever the order they are made in. (greedy_cpu's hold the
// first index of a block that has the value, and the last group looks it up.)
#pragma once
#include "common.hpp"

enum Logits : int { logits_f32 = 0, logits_bf16 = 1 };

inline float value_at(const float *row, int i) { return row[i]; }
inline float value_at(const uint16_t *row, int i) { return bf16_to_f32(row[i]); }

// −0.0 counts as +0.0; 0 is a NaN's, and below the key of −inf.
inline uint32_t key_of(float x) {
  uint32_t u = sycl::bit_cast<uint32_t>(x + 0.0f);
  return x == x ? u ^ (uint32_t(int32_t(u) >> 31) | 0x80000000u) : 0;
}

inline float value_of(uint32_t key) { return sycl::bit_cast<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

inline uint64_t candidate(float x, int index) {
  uint32_t key = key_of(x);
  return key ? uint64_t(key) << 32 | uint32_t(~index) : 0;
}

inline uint32_t key_in(uint64_t candidate) { return uint32_t(candidate >> 32); }
inline int index_in(uint64_t candidate) { return candidate ? int(~uint32_t(candidate)) : -1; }

// A row's part of the problem. Groups are [rows, chunks]; each leaves `kept` candidates of its columns in scratch
// [rows, chunks, kept], and the last one to arrive at its row joins them. `arrived` is zero before a launch and after it.
struct Selection {
  int64_t stride;  // elements from row to row
  int columns, chunk, chunks, kept, type, next_n;

  int begin(int64_t c) const { return int(c) * chunk; }
  // Behind the last of a chunk's columns, of which the first `valid` count.
  int end(int64_t c, int valid) const { return sycl::max(begin(c), sycl::min(begin(c) + chunk, valid)); }
  int valid(const int32_t *seq_lens, int64_t row) const {
    int r = int(row), n = next_n, group = r, among = 0;
    if (n > 1) {  // by steps: a run-time division would cost the B70 an inexact reciprocal
      for (group = 0; r >= n; r -= n) group++;
      among = r;
    }
    return sycl::clamp(seq_lens[group] - n + among + 1, 0, columns);
  }
};

// True for the last of `chunks` groups; what the others wrote is seen by it, and the counter is ready for the next launch.
inline bool last_of(uint32_t *arrived, int64_t row, int chunks) {
  sycl::atomic_ref<uint32_t, sycl::memory_order::acq_rel, sycl::memory_scope::device> count(arrived[row]);
  if (count.fetch_add(1) + 1 < uint32_t(chunks)) return false;
  count.store(0, sycl::memory_order::relaxed);
  return true;
}

// A row's token, and where the next step reads it; a slot of −1 is a padding row's.
inline void hand_over(uint64_t best, int64_t row, const int32_t *slots, void *token, int wide, int64_t *next_input_ids) {
  int index = index_in(best);
  if (wide) static_cast<int64_t *>(token)[row] = index;
  else static_cast<int32_t *>(token)[row] = index;
  if (slots[row] >= 0) next_input_ids[slots[row]] = index;
}

#define GREEDY_ARGS                                                                                                   \
  const void *logits, const int32_t *slots, void *token, int64_t *next_input_ids, uint64_t *found, uint32_t *arrived, \
      Selection s, int wide
#define SELECT_ARGS const void *logits, const int32_t *seq_lens, int32_t *indices, uint64_t *found, uint32_t *arrived, Selection s

// A row's logits as they lie, handed to `use` in their type.
template <class Use> inline auto with_row(const void *logits, const Selection &s, int64_t row, Use use) {
  if (s.type == logits_f32) return use(static_cast<const float *>(logits) + row * s.stride);
  return use(static_cast<const uint16_t *>(logits) + row * s.stride);
}
