// The route prologue: rows per expert, their offsets, and where each (token, slot) pair goes.
//
// Ids are int32 [pairs]; −1 is padding. With an expert_map (null: none) the id that counts is the local one. Three ways
// to the same three outputs; all but the atomic one give the canonical order by (token, slot) inside an expert.
#include "common.hpp"

constexpr int gpu_lanes = 256;

inline int local_id(const int32_t *ids, const int32_t *expert_map, int64_t pair) {
  int id = ids[pair];
  return id >= 0 && expert_map ? expert_map[id] : id;
}

// Exclusive prefix by one lane; 256 to 1024 experts are a microsecond, and every lane waits for it anyway.
inline void prefix(const int32_t *rows_per_expert, int64_t *offsets, int experts) {
  int64_t sum = 0;
  for (int e = 0; e < experts; e++) {
    offsets[e] = sum;
    sum += rows_per_expert[e];
  }
  offsets[experts] = sum;
}

// fused_prologue, cpu body: one item, two passes over the pairs.
KERNEL(1) void route_fused_cpu(const int32_t *ids, const int32_t *expert_map, int32_t *rows_per_expert,
                               int64_t *offsets, int32_t *permuted, int64_t pairs, int experts) {
  for (int e = 0; e < experts; e++) rows_per_expert[e] = 0;
  for (int64_t i = 0; i < pairs; i++)
    if (int e = local_id(ids, expert_map, i); e >= 0) rows_per_expert[e]++;
  prefix(rows_per_expert, offsets, experts);
  for (int e = 0; e < experts; e++) rows_per_expert[e] = 0;
  for (int64_t i = 0; i < pairs; i++) {
    int e = local_id(ids, expert_map, i);
    permuted[i] = e < 0 ? -1 : int32_t(offsets[e] + rows_per_expert[e]++);
  }
}

// fused_prologue, gpu body: one work-group; a lane owns every 256th expert, counts it, and after the prefix places it.
KERNEL(1) SUB_GROUP(16) void route_fused_gpu(const int32_t *ids, const int32_t *expert_map, int32_t *rows_per_expert,
                                             int64_t *offsets, int32_t *permuted, int64_t pairs, int experts) {
  auto item = this_item::get_nd_item<1>();
  int lane = int(item.get_local_id(0));
  for (int e = lane; e < experts; e += gpu_lanes) {
    int count = 0;
    for (int64_t i = 0; i < pairs; i++) count += local_id(ids, expert_map, i) == e;
    rows_per_expert[e] = count;
  }
  sycl::group_barrier(item.get_group());
  if (lane == 0) prefix(rows_per_expert, offsets, experts);
  sycl::group_barrier(item.get_group());
  for (int e = lane; e < experts; e += gpu_lanes) {
    int64_t next = offsets[e];
    if (rows_per_expert[e])
      for (int64_t i = 0; i < pairs; i++)
        if (local_id(ids, expert_map, i) == e) permuted[i] = int32_t(next++);
  }
  for (int64_t i = lane; i < pairs; i += gpu_lanes)
    if (local_id(ids, expert_map, i) < 0) permuted[i] = -1;
}

// zero_remap, first launch: the counters.
KERNEL(1) void route_zero(int32_t *rows_per_expert) {
  rows_per_expert[this_item::get_nd_item<1>().get_global_linear_id()] = 0;
}

// zero_remap, second launch: pairs arrive by atomics, so their order inside an expert is whoever came first.
template <int LANES>
inline void route_arrive(const int32_t *ids, const int32_t *expert_map, int32_t *rows_per_expert, int64_t *offsets,
                         int32_t *permuted, int64_t pairs, int experts) {
  Lanes<LANES> lanes;
  for (int64_t i = lanes.lane; i < pairs; i += LANES) {
    int e = local_id(ids, expert_map, i);
    if (e >= 0) {
      sycl::atomic_ref<int32_t, sycl::memory_order::relaxed, sycl::memory_scope::device> count(rows_per_expert[e]);
      permuted[i] = count.fetch_add(1);
    } else {
      permuted[i] = -1;
    }
  }
  lanes.barrier();
  if (lanes.lane == 0) prefix(rows_per_expert, offsets, experts);
  lanes.barrier();
  for (int64_t i = lanes.lane; i < pairs; i += LANES)
    if (int e = local_id(ids, expert_map, i); e >= 0) permuted[i] += int32_t(offsets[e]);
}

KERNEL(1) void route_arrive_cpu(const int32_t *ids, const int32_t *expert_map, int32_t *rows_per_expert,
                                int64_t *offsets, int32_t *permuted, int64_t pairs, int experts) {
  route_arrive<1>(ids, expert_map, rows_per_expert, offsets, permuted, pairs, experts);
}
KERNEL(1) SUB_GROUP(16) void route_arrive_gpu(const int32_t *ids, const int32_t *expert_map, int32_t *rows_per_expert,
                                              int64_t *offsets, int32_t *permuted, int64_t pairs, int experts) {
  route_arrive<gpu_lanes>(ids, expert_map, rows_per_expert, offsets, permuted, pairs, experts);
}

// prefix_offsets: one item an expert counts, one prefixes, one item an expert places; item `experts` writes the −1s.
KERNEL(1) void route_count(const int32_t *ids, const int32_t *expert_map, int32_t *rows_per_expert, int64_t pairs) {
  int e = int(this_item::get_nd_item<1>().get_global_linear_id()), count = 0;
  for (int64_t i = 0; i < pairs; i++) count += local_id(ids, expert_map, i) == e;
  rows_per_expert[e] = count;
}

KERNEL(1) void route_prefix(const int32_t *rows_per_expert, int64_t *offsets, int experts) {
  prefix(rows_per_expert, offsets, experts);
}

KERNEL(1) void route_place(const int32_t *ids, const int32_t *expert_map, const int64_t *offsets, int32_t *permuted,
                           int64_t pairs, int experts) {
  int e = int(this_item::get_nd_item<1>().get_global_linear_id());
  int64_t next = e < experts ? offsets[e] : 0;
  if (e < experts && next == offsets[e + 1]) return;
  for (int64_t i = 0; i < pairs; i++) {
    int id = local_id(ids, expert_map, i);
    if (id == e) permuted[i] = int32_t(next++);
    else if (id < 0 && e == experts) permuted[i] = -1;
  }
}
