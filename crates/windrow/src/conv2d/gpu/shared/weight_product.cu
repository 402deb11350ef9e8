// The matrix product A^T B of two f32 operands, each split into two f16 parts, for sm_90a: weight gradients in f32.
//
//     out[m, n] = sum over rows of a[row, m] b[row, n]
//
// Rows are the pixels, or tiles, of all images. A side's channels lie in octets: [octet][row][8], the low parts after
// the high ones. So neighbouring rows of an octet are contiguous. wgmma reads them as a column of blocks of 8 x 8. A
// tap of a filter reads the same rows at a constant offset.
//
// Tensor cores truncate when they add. So their sums are short: 64 rows, the products with low parts first. Then they
// are added to sums that round.
//
// A block has two consumer warpgroups, which multiply 64 columns of side m by BLOCK_N of side n each, and a producer
// warpgroup that keeps a ring of stages full. A work item is a tile of `out`, a part of the rows, and for Winograd one
// position of the transformed tile, which is a separate product.
//
// Constants: ELEMENT_F32, BLOCK_N 64 or 128, STAGES.

#include "conv2d.cuh"
#include "hopper.cuh"

constexpr int BLOCK_M = 128;
constexpr int STEP_ROWS = 64, STEP_PRODUCTS = STEP_ROWS / 16;
constexpr int OCTET_BYTES = STEP_ROWS * 16; // of a step
constexpr int M_OCTETS = BLOCK_M / 8, N_OCTETS = BLOCK_N / 8;
constexpr int M_BYTES = M_OCTETS * OCTET_BYTES, N_BYTES = N_OCTETS * OCTET_BYTES; // of one part
constexpr int STAGE_BYTES = 2 * (M_BYTES + N_BYTES);
constexpr int CONSUMER_WARPS = 8;
constexpr int SUMS = BLOCK_N / 2;

struct Side {
    const unsigned char* halves;
    const u32* max;         // bits of the largest finite magnitude that it was scaled by
    i64 low;                // bytes from the high parts to the low ones
    i64 position, octet;    // bytes from a position, an octet to the next
    i64 out_tap, out_channel; // strides in elements
    int octets, channels;   // of all taps, of one
    Divisor tap_octets;     // octets of one
    int exponent;           // to which it was scaled

    // The place of a channel in `out`; negative if there is no such channel.
    __device__ __forceinline__ i64 place(int octet, int in_octet) const {
        const int tap = tap_octets.divide(octet);
        const int channel = (octet - tap * static_cast<int>(tap_octets.value)) * 8 + in_octet;
        return octet < octets && channel < channels ? tap * out_tap + channel * out_channel : -1;
    }
};

// The place at which the rows of a tap of side x begin, in one of the planes that differ by the remainder of rows and
// columns.
struct Taps {
    Divisor s, stride_h, stride_w, period_h, period_w;
    int dilation_h, dilation_w, planes_w, pitch;
    i64 plane; // bytes from a plane to the next

    __device__ __forceinline__ i64 bytes(int tap) const {
        const int r = s.divide(tap), column = tap - r * static_cast<int>(s.value);
        const int plane_h = r - period_h.divide(r) * static_cast<int>(period_h.value);
        const int plane_w = column - period_w.divide(column) * static_cast<int>(period_w.value);
        const i64 row = static_cast<i64>(stride_h.divide(r * dilation_h)) * pitch + stride_w.divide(column * dilation_w);
        return (plane_h * planes_w + plane_w) * plane + row * 16;
    }
};

struct Params {
    Side m, n;
    float* out;
    i64 out_part, out_position; // strides in elements
    int items, steps, parts;
    int pairs;                  // whether channels of n come in pairs that are neighbours in `out`, and aligned
    Divisor m_tiles, n_tiles, positions;
    Taps taps;
};
static_assert(PARAMS_AGREE, "as the host's structure");

// What a block computes at a time.
struct Item {
    int m, n, position, part, first, last;

    __device__ __forceinline__ Item(const Params& p, int item) {
        const int row = p.n_tiles.divide(item), matrix = p.m_tiles.divide(row);
        n = item - row * static_cast<int>(p.n_tiles.value);
        m = row - matrix * static_cast<int>(p.m_tiles.value);
        part = p.positions.divide(matrix);
        position = matrix - part * static_cast<int>(p.positions.value);
        first = static_cast<int>(static_cast<i64>(p.steps) * part / p.parts);
        last = static_cast<int>(static_cast<i64>(p.steps) * (part + 1) / p.parts);
    }
};

__device__ __forceinline__ const unsigned char* rows_of(const Params& p, const Side& side, int octet, int position) {
    const int tap = side.tap_octets.divide(octet), in_tap = octet - tap * static_cast<int>(side.tap_octets.value);
    return side.halves + position * side.position + in_tap * side.octet + p.taps.bytes(tap);
}

// A lane keeps the copies of one f16 part of an octet of one side coming. One warp alone would be slower than the
// copies that it waits for.
__device__ __forceinline__ void produce(const Params& p, int warp, int lane, u32 stages, u32 full, u32 empty) {
    Ring ring;
    const int half = lane % 2, index = 8 * warp + lane / 2;
    const bool of_m = index < M_OCTETS;
    const Side& side = of_m ? p.m : p.n;
    const int in_tile = of_m ? index : index - M_OCTETS;
    const u32 place = (of_m ? half * M_BYTES : 2 * M_BYTES + half * N_BYTES) + in_tile * OCTET_BYTES;
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const Item item(p, i);
        const int octet = of_m ? item.m * M_OCTETS + in_tile : item.n * N_OCTETS + in_tile;
        const bool exists = lane < 16 && octet < side.octets && (of_m || in_tile < N_OCTETS);
        const unsigned char* from = side.halves;
        if (exists)
            from = rows_of(p, side, octet, item.position) + half * side.low + static_cast<i64>(item.first) * OCTET_BYTES;
        const int octets = min(p.m.octets - item.m * M_OCTETS, M_OCTETS) + min(p.n.octets - item.n * N_OCTETS, N_OCTETS);
#pragma unroll 1
        for (int step = item.first; step < item.last; step++) {
            const u32 barrier = full + 8 * ring.slot;
            barrier_wait(empty + 8 * ring.slot, ring.parity ^ 1);
            if (warp == 0 && lane == 0) barrier_expect(barrier, octets * 2 * OCTET_BYTES);
            if (exists) copy_in(stages + ring.slot * STAGE_BYTES + place, from, OCTET_BYTES, barrier);
            from += OCTET_BYTES;
            ring.advance(STAGES);
        }
    }
}

struct Consumer {
    float sum[SUMS], acc[SUMS];

    __device__ __forceinline__ void multiply(u32 stage, int group) {
        const u64 m = matrix_descriptor(stage + group * (8 * OCTET_BYTES), 128, OCTET_BYTES);
        const u64 n = matrix_descriptor(stage + 2 * M_BYTES, 128, OCTET_BYTES);
        constexpr u64 PRODUCT = 256 >> 4, M_LOW = M_BYTES >> 4, N_LOW = N_BYTES >> 4;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < STEP_PRODUCTS; i++) wgmma_transposed(acc, m + M_LOW + i * PRODUCT, n + i * PRODUCT, i > 0);
#pragma unroll
        for (int i = 0; i < STEP_PRODUCTS; i++) wgmma_transposed(acc, m + i * PRODUCT, n + N_LOW + i * PRODUCT, 1);
#pragma unroll
        for (int i = 0; i < STEP_PRODUCTS; i++) wgmma_transposed(acc, m + i * PRODUCT, n + i * PRODUCT, 1);
        wgmma_commit();
        wgmma_wait();
#pragma unroll
        for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(acc[i])::"memory");
    }

    __device__ __forceinline__ void store(const Params& p, const Item& item, int group, int warp, int lane) const {
        const float scale_m = power_of_two_scale(*p.m.max, p.m.exponent, true);
        const float scale_n = power_of_two_scale(*p.n.max, p.n.exponent, true);
        float* const out = p.out + item.part * p.out_part + item.position * p.out_position;
        const int octet = item.m * M_OCTETS + 8 * group + 2 * warp;
        const i64 m[2] = {p.m.place(octet, lane / 4), p.m.place(octet + 1, lane / 4)};
#pragma unroll
        for (int j = 0; j < N_OCTETS; j++) {
            const i64 first = p.n.place(item.n * N_OCTETS + j, 2 * (lane % 4));
            const i64 second = p.n.place(item.n * N_OCTETS + j, 2 * (lane % 4) + 1);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                if (m[t] < 0 || first < 0) continue;
                const float a = sum[4 * j + 2 * t] * scale_m * scale_n, b = sum[4 * j + 2 * t + 1] * scale_m * scale_n;
                if (p.pairs) {
                    *reinterpret_cast<float2*>(out + m[t] + first) = make_float2(a, b);
                } else {
                    out[m[t] + first] = a;
                    if (second >= 0) out[m[t] + second] = b;
                }
            }
        }
    }
};

__device__ __forceinline__ void consume(const Params& p, int group, int warp, int lane, u32 stages, u32 full, u32 empty) {
    Consumer consumer;
    Ring ring;
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const Item item(p, i);
        const bool exists = item.m * M_OCTETS + 8 * group < p.m.octets;
#pragma unroll
        for (int j = 0; j < SUMS; j++) consumer.sum[j] = 0;
#pragma unroll 1
        for (int step = item.first; step < item.last; step++) {
            barrier_wait(full + 8 * ring.slot, ring.parity);
            if (exists) consumer.multiply(stages + ring.slot * STAGE_BYTES, group);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * ring.slot);
            ring.advance(STAGES);
            if (exists) {
#pragma unroll
                for (int j = 0; j < SUMS; j++) consumer.sum[j] += consumer.acc[j];
            }
        }
        if (exists) consumer.store(p, item, group, warp, lane);
    }
}

extern "C" __global__ __launch_bounds__(384, 1) void KERNEL(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 stages = shared_address(shared), full = stages + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, CONSUMER_WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (group == 2) {
        give_registers<40>();
        produce(p, warp, lane, stages, full, empty);
    } else {
        take_registers<232>();
        consume(p, group, warp, lane, stages, full, empty);
    }
}
