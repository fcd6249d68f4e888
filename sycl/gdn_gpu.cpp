// GDN decode on a GPU: conv, recurrence, and both in one launch; a row of V a sub-group, its state in registers.
//
// A source of its own, since what a CPU device never runs need not be compiled for it.
#include "gdn.hpp"

constexpr int gpu_lanes = 128;  // of the recurrence: eight sub-groups of sixteen

// One work-group a sequence and 256 channels of q|k|v, then of z, then of b|a.
KERNEL(2) SUB_GROUP(16) void conv_gpu(const uint16_t *qkvz, const uint16_t *ba, const uint16_t *weights, const uint16_t *bias,
                                      const int32_t *slots, const int32_t *starts, uint16_t *conv_state, uint16_t *qkv, uint16_t *z,
                                      uint16_t *b, uint16_t *a, Gdn g) {
  Lanes<conv_block, 2> lanes;
  int64_t sequence = lanes.row(), slot = slots[sequence];
  int first = starts[sequence], last = starts[sequence + 1], begin = int(lanes.column()) * conv_block, c = begin + lanes.lane;
  if (slot >= 0 && first < last && c < g.channels())
    conv_channel(g, qkvz, weights, bias, conv_state + slot * g.conv_stride, first, last, c,
                 [=](int t, uint16_t bits) { qkv[int64_t(t) * g.channels() + c] = bits; });
  conv_rest<conv_block>(qkvz, ba, first, last, slot >= 0, begin, lanes.lane, z, b, a, g);
}

// ---------------------------------------------------------------- recurrence, gpu body

// A lane of sixteen stands for virtual lanes l and l + 16; it holds elements l, l + 32, … and l + 16, l + 48, … of a row.
template <int DIM> struct Row {
  static constexpr int half = DIM / 32;
  float low[half], high[half];
};

inline float fold(sycl::sub_group group, float low, float high) {
  float p = low + high;
  for (int h = 8; h > 0; h /= 2) p = p + sycl::permute_group_by_xor(group, p, h);
  return p;
}

template <int DIM> inline float dot(sycl::sub_group group, const Row<DIM> &x, const Row<DIM> &y) {
  float low = 0.0f, high = 0.0f;
  for (int j = 0; j < Row<DIM>::half; j++) {
    low += x.low[j] * y.low[j];
    high += x.high[j] * y.high[j];
  }
  return fold(group, low, high);
}

template <int DIM> inline Row<DIM> normed_row(const Gdn &g, sycl::sub_group group, const uint16_t *from, float scale) {
  int lane = int(group.get_local_linear_id());
  Row<DIM> x;
  for (int j = 0; j < Row<DIM>::half; j++) {
    x.low[j] = bf16_to_f32(from[32 * j + lane]);
    x.high[j] = bf16_to_f32(from[32 * j + 16 + lane]);
  }
  float total = dot<DIM>(group, x, x);  // its length is taken element by element: kept beside 256 of them it spills
  for (int j = 0; j < Row<DIM>::half; j++) {
    x.low[j] = normed(x.low[j], length_of(total, g.l2norm), g.l2norm) * scale;
    x.high[j] = normed(x.high[j], length_of(total, g.l2norm), g.l2norm) * scale;
  }
  return x;
}

// One v-head of one sequence by a work-group: each sub-group takes every so-manieth row of V through all tokens.
template <int DIM>
inline void head_gpu(const Gdn &g, const Recurrence &r, void *state, int first, int last, int head, sycl::sub_group group, int groups) {
  int lane = int(group.get_local_linear_id()), k_head = g.k_head(head);
  float scale = float(1.0 / sycl::sqrt(double(DIM)));
  for (int v = int(group.get_group_linear_id()); v < DIM; v += groups) {
    Row<DIM> s;
    for (int j = 0; j < Row<DIM>::half; j++) {
      s.low[j] = load_state(state, state_at(g, v, 32 * j + lane), g.state_type);
      s.high[j] = load_state(state, state_at(g, v, 32 * j + 16 + lane), g.state_type);
    }
    for (int t = first; t < last; t++) {
      const uint16_t *row = r.qkv + int64_t(t) * g.channels();
      Row<DIM> k = normed_row<DIM>(g, group, row + g.keys() + (k_head << g.shift), 1.0f);
      float keep = r.decayed(g, t, head), beta = r.beta(g, t, head);
      for (int j = 0; j < Row<DIM>::half; j++) {
        s.low[j] = s.low[j] * keep;
        s.high[j] = s.high[j] * keep;
      }
      float value = bf16_to_f32(row[2 * g.keys() + (head << g.shift) + v]);
      float d = (value - dot<DIM>(group, s, k)) * beta;
      for (int j = 0; j < Row<DIM>::half; j++) {
        s.low[j] = s.low[j] + d * k.low[j];
        s.high[j] = s.high[j] + d * k.high[j];
      }
      Row<DIM> q = normed_row<DIM>(g, group, row + (k_head << g.shift), scale);
      float o = dot<DIM>(group, s, q);
      if (lane == 0) r.out[int64_t(t) * g.values() + (head << g.shift) + v] = rn_bf16(o);
    }
    for (int j = 0; j < Row<DIM>::half; j++) {
      store_state(state, state_at(g, v, 32 * j + lane), g.state_type, s.low[j]);
      store_state(state, state_at(g, v, 32 * j + 16 + lane), g.state_type, s.high[j]);
    }
  }
}

template <int DIM> inline void recurrent_group(RECURRENT_ARGS) {
  Lanes<gpu_lanes, 2> lanes;
  int64_t sequence = lanes.row(), slot = slots[sequence];
  if (slot < 0 || starts[sequence] == starts[sequence + 1]) return;
  int head = int(lanes.column());
  Recurrence r{qkv, a, b, nullptr, a_log, dt_bias, dt_bf16, out};
  head_gpu<DIM>(g, r, state_of(ssm_state, g, slot, head), starts[sequence], starts[sequence + 1], head,
                this_item::get_sub_group(), gpu_lanes / 16);
}

KERNEL(2) SUB_GROUP(16) void recurrent_64_gpu(RECURRENT_ARGS) {
  recurrent_group<64>(qkv, a, b, a_log, dt_bias, slots, starts, ssm_state, out, g, dt_bf16);
}
KERNEL(2) SUB_GROUP(16) void recurrent_128_gpu(RECURRENT_ARGS) {
  recurrent_group<128>(qkv, a, b, a_log, dt_bias, slots, starts, ssm_state, out, g, dt_bf16);
}
KERNEL(2) SUB_GROUP(16) void recurrent_256_gpu(RECURRENT_ARGS) {
  recurrent_group<256>(qkv, a, b, a_log, dt_bias, slots, starts, ssm_state, out, g, dt_bf16);
}

// ---------------------------------------------------------------- both in one launch

// The channels of one k-head and its v-heads: q, k, then v. Lane by lane, through all tokens, into `qkv`.
template <int LANES>
inline void conv_heads(const Gdn &g, const uint16_t *qkvz, const uint16_t *weights, const uint16_t *bias, uint16_t *conv_state,
                       uint16_t *qkv, uint16_t *z, int first, int last, int k_head, int lane) {
  int dim = g.dim(), mine = (2 + g.ratio) << g.shift;
  for (int i = lane; i < mine; i += LANES) {
    int part = i >> g.shift, c = part < 2 ? part * g.keys() + (k_head << g.shift) + (i & (dim - 1))
                                          : 2 * g.keys() + (k_head * g.ratio << g.shift) + i - 2 * dim;
    conv_channel(g, qkvz, weights, bias, conv_state, first, last, c,
                 [=](int t, uint16_t bits) { qkv[int64_t(t) * g.channels() + c] = bits; });
  }
  for (int i = lane; i < g.ratio << g.shift; i += LANES) copy_z(g, qkvz, z, first, last, (k_head * g.ratio << g.shift) + i, true);
}

template <int DIM> inline void step_group(STEP_ARGS) {
  Lanes<gpu_lanes, 2> lanes;
  int64_t sequence = lanes.row(), slot = slots[sequence];
  int first = starts[sequence], last = starts[sequence + 1], k_head = int(lanes.column());
  if (slot < 0) {
    for (int i = lanes.lane; i < g.ratio << g.shift; i += gpu_lanes)
      copy_z(g, qkvz, z, first, last, (k_head * g.ratio << g.shift) + i, false);
    return;
  }
  if (first == last) return;
  conv_heads<gpu_lanes>(g, qkvz, weights, bias, conv_state + slot * g.conv_stride, qkv, z, first, last, k_head, lanes.lane);
  lanes.barrier();
  Recurrence r{qkv, nullptr, nullptr, ba, a_log, dt_bias, dt_bf16, out};
  for (int head = k_head * g.ratio; head < (k_head + 1) * g.ratio; head++)
    head_gpu<DIM>(g, r, state_of(ssm_state, g, slot, head), first, last, head, this_item::get_sub_group(), gpu_lanes / 16);
}

KERNEL(2) SUB_GROUP(16) void step_64_gpu(STEP_ARGS) {
  step_group<64>(qkvz, ba, weights, bias, a_log, dt_bias, slots, starts, conv_state, ssm_state, z, out, qkv, g, dt_bf16);
}
KERNEL(2) SUB_GROUP(16) void step_128_gpu(STEP_ARGS) {
  step_group<128>(qkvz, ba, weights, bias, a_log, dt_bias, slots, starts, conv_state, ssm_state, z, out, qkv, g, dt_bf16);
}
KERNEL(2) SUB_GROUP(16) void step_256_gpu(STEP_ARGS) {
  step_group<256>(qkvz, ba, weights, bias, a_log, dt_bias, slots, starts, conv_state, ssm_state, z, out, qkv, g, dt_bf16);
}
