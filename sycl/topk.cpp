// Greedy and top-k on a CPU: one pass over the logits, sixteen at a time; what cannot be selected costs a comparison.
#include "topk.hpp"

using f16v = float __attribute__((ext_vector_type(16)));
using f16u = float __attribute__((ext_vector_type(16), aligned(4)));
using u16u = uint16_t __attribute__((ext_vector_type(16), aligned(2)));
using u32v = uint32_t __attribute__((ext_vector_type(16)));

constexpr int together = 16;
constexpr int block = 4096;  // columns that may be looked at again, for the index of the largest

inline f16v load(const float *p) { return *reinterpret_cast<const f16u *>(p); }
inline f16v load(const uint16_t *p) {
  return sycl::bit_cast<f16v>(__builtin_convertvector(*reinterpret_cast<const u16u *>(p), u32v) << 16);
}

// The larger of each pair; the second where the first is a NaN.
inline f16v larger(f16v x, f16v y) { return x > y ? x : y; }

// ---------------------------------------------------------------- greedy

// The largest of n logits, −inf where none is above it.
template <class T> inline float largest(const T *x, int n) {
  const float low = -__builtin_inff();
  f16v m[4] = {low, low, low, low};
  int i = 0;
  for (; i + 4 * together <= n; i += 4 * together)
    for (int j = 0; j < 4; j++) m[j] = larger(load(x + i + j * together), m[j]);
  m[0] = larger(larger(m[0], m[1]), larger(m[2], m[3]));
  float best = low;
  for (int j = 0; j < together; j++) best = m[0][j] > best ? m[0][j] : best;
  for (; i < n; i++) best = value_at(x, i) > best ? value_at(x, i) : best;
  return best;
}

// The first of columns [i, end) that has a value, or end.
template <class T> inline int first_of(const T *row, int i, int end, float value) {
  for (; i + together <= end; i += together)
    if (__builtin_reduce_or(load(row + i) == value)) break;
  while (i < end && value_at(row, i) != value) i++;
  return i;
}

// The largest value in columns [begin, end), and where the first block begins that has it; −inf is looked up at once.
template <class T> inline uint64_t best_of(const T *row, int begin, int end) {
  const float low = -__builtin_inff();
  float best = low;
  int from = end;
  for (int b = begin; b < end; b += block)
    if (float m = largest(row + b, sycl::min(block, end - b)); m > best) best = m, from = b;
  if (from == end) from = first_of(row, begin, end, low);
  return from < end ? candidate(best, from) : 0;
}

KERNEL(2) void greedy_cpu(GREEDY_ARGS) {
  Lanes<1, 2> lanes;
  int64_t row = lanes.row(), c = lanes.column();
  uint64_t *mine = found + row * s.chunks;
  mine[c] = with_row(logits, s, row, [&](auto *x) { return best_of(x, s.begin(c), s.end(c, s.columns)); });
  if (!last_of(arrived, row, s.chunks)) return;
  uint64_t best = 0;
  for (int i = 0; i < s.chunks; i++) best = sycl::max(best, mine[i]);
  if (best)
    best = with_row(logits, s, row, [&](auto *x) {
      float value = value_of(key_in(best));
      return candidate(value, first_of(x, index_in(best), s.columns, value));
    });
  hand_over(best, row, slots, token, wide, next_input_ids);
}

// ---------------------------------------------------------------- select

// The k largest candidates so far, the smallest of them first: every parent is below its children.
struct Heap {
  uint64_t *held;
  int k, count = 0;

  // The value that a logit must be above, once k are held.
  float bar = 0;

  void sift(int at) {
    uint64_t x = held[at];
    for (int child; (child = 2 * at + 1) < count; at = child) {
      if (child + 1 < count && held[child + 1] < held[child]) child++;
      if (held[child] >= x) break;
      held[at] = held[child];
    }
    held[at] = x;
  }
  bool full() const { return count == k; }
  void add(uint64_t x) {
    if (full()) {
      if (x <= held[0]) return;
      held[0] = x;
      sift(0);
    } else if (x) {
      held[count++] = x;
      if (full())
        for (int at = k / 2 - 1; at >= 0; at--) sift(at);
    }
    if (full()) bar = value_of(key_in(held[0]));
  }
};

// The k largest of row[begin … end) into a heap. Columns come in ascending order, so an equal of the smallest held never counts.
template <class T> inline void gather(const T *row, int begin, int end, Heap &heap) {
  const f16v low = -__builtin_inff();
  int i = begin;
  for (; i < end && !heap.full(); i++) heap.add(candidate(value_at(row, i), i));
  for (; i + 4 * together <= end; i += 4 * together) {
    f16v top = larger(larger(load(row + i), low), larger(load(row + i + together), low));
    top = larger(top, larger(larger(load(row + i + 2 * together), low), larger(load(row + i + 3 * together), low)));
    if (__builtin_reduce_or(top > heap.bar))
      for (int j = i; j < i + 4 * together; j++)
        if (value_at(row, j) > heap.bar) heap.add(candidate(value_at(row, j), j));
  }
  for (; i < end; i++) heap.add(candidate(value_at(row, i), i));
}

KERNEL(2) void select_cpu(SELECT_ARGS) {
  Lanes<1, 2> lanes;
  int64_t row = lanes.row(), c = lanes.column();
  uint64_t *all = found + row * s.chunks * s.kept;
  Heap mine{all + c * s.kept, s.kept};
  with_row(logits, s, row, [&](auto *x) { gather(x, s.begin(c), s.end(c, s.valid(seq_lens, row)), mine); });
  for (int i = mine.count; i < s.kept; i++) mine.held[i] = 0;
  if (!last_of(arrived, row, s.chunks)) return;
  Heap whole{all, s.kept};  // the first chunk's, as it lies
  while (whole.count < s.kept && all[whole.count]) whole.count++;
  for (int i = s.kept; i < s.chunks * s.kept; i++) whole.add(all[i]);
  for (int i = 0; i < s.kept; i++) indices[row * s.kept + i] = i < whole.count ? index_in(all[i]) : -1;
}
