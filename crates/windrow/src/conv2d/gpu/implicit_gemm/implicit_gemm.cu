// Convolution as a product of matrices, for sm_90a. The left one, of gathered inputs, is never in memory. Any filter,
// stride, padding, dilation and groups; f32.
//
//     y[pixel, k] = sum over terms t = (tap, channel) of x[pixel + tap, channel] w[t, k]
//
// f32 operands are split in two f16 parts, high and low, of which three products are formed; the fourth is below the
// rounding of f32. f16 has a small range, so both operands are scaled by powers of two. An output channel of the filter
// is scaled by its largest tap when it is packed. The pixels of a warp are scaled by the largest that the warp has seen
// so far. If later terms would leave the range, sums are scaled down to a new power, which is exact.
//
// Tensor cores truncate when they add. So their sums are short: 64 terms, the products with low parts first. Then they
// are added to sums that round.
//
// A block has two consumer warpgroups, which multiply 64 pixels by BLOCK_K channels each, and a producer warpgroup that
// keeps a ring of stages full. SPLIT blocks of a cluster share the terms of a tile; their sums are added in the order of
// the blocks.
//
// Constants: ELEMENT_F32; EPILOGUE; RESIDUAL; FRAMES; GATHER (implicit_gemm.cuh); PADDED 0 or 1: taps may be outside the image;
// BLOCK_K 64 or 128; SPLIT 1, 2, 4 or 8; STAGES; CHANNELS_LAST_OUT 0 or 1; INPUT_EXPONENT, FILTER_EXPONENT.

#include "implicit_gemm_gather.cuh"
#include "implicit_gemm_special.cuh"

// The three warpgroups have 504 registers for each lane together. The producer needs many for addresses of elements.
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = (504 - PRODUCER_REGISTERS) / 2;

// Four terms of two pixels for each product.
__device__ __forceinline__ void load_terms(float (&v)[TAP_PRODUCTS][2][4], u32 stage, int row, int q) {
#pragma unroll
    for (int i = 0; i < TAP_PRODUCTS; i++) {
#pragma unroll
        for (int t = 0; t < 2; t++) {
#if GATHER == CHANNELS
            const u32 at = stage + (row + 8 * t) * (STEP_DEPTH * 4) + q * 16 + ((i ^ (row & 1)) * 64);
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(v[i][t][0]), "=f"(v[i][t][1]), "=f"(v[i][t][2]), "=f"(v[i][t][3]) : "r"(at));
#else
            const u32 at = stage + (16 * i + 4 * q) * (BLOCK_M * 4) + ((row + 8 * t ^ q * 8) << 2);
#pragma unroll
            for (int j = 0; j < 4; j++)
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v[i][t][j]) : "r"(at + j * (BLOCK_M * 4)));
#endif
        }
    }
}

// The power of two that a warp scales its pixels by.
struct Scale {
    float value, limit;

    // Nothing was seen: the first terms set it.
    __device__ __forceinline__ Scale() : value(power_of_two(126)), limit(0) {}

    // Lowers it where a term is too large for it, with the sums so far. The factor by which it became smaller.
    __device__ __forceinline__ float fit(const float (&v)[TAP_PRODUCTS][2][4], float (&sum)[SUMS]) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < TAP_PRODUCTS * 8; i++) largest = fmaxf(largest, fabsf(v[i / 8][i / 4 % 2][i % 4]));
        if (!__any_sync(~0u, !(largest < limit))) return 1;
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < TAP_PRODUCTS * 8; i++) bits = max(bits, finite_magnitude(v[i / 8][i / 4 % 2][i % 4]));
        bits = __reduce_max_sync(~0u, bits);
        const int exponent = INPUT_EXPONENT - (static_cast<int>(bits >> 23) - 127);
        const float fitting = fminf(value, power_of_two(min(max(exponent, -126), 126))), factor = fitting / value;
#pragma unroll
        for (int i = 0; i < SUMS; i++) sum[i] *= factor;
        value = fitting;
        limit = power_of_two(15) / value;
        return factor;
    }

    // What undoes it but for 2^INPUT_EXPONENT.
    __device__ __forceinline__ float inverse() const { return power_of_two(INPUT_EXPONENT) / value; }
};

// The terms of a step as f16 parts, in the order of operand A.
struct Operand {
    u32 high[TAP_PRODUCTS][4], low[TAP_PRODUCTS][4];

    __device__ __forceinline__ void split(const float (&v)[TAP_PRODUCTS][2][4], float scale) {
#pragma unroll
        for (int i = 0; i < TAP_PRODUCTS; i++) {
#pragma unroll
            for (int t = 0; t < 2; t++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float a = v[i][t][2 * half], b = v[i][t][2 * half + 1];
                    const u32 rounded = floats_to_f16x2(a * scale, b * scale);
                    const float2 wide = unpack_f16x2(rounded);
                    high[i][2 * half + t] = rounded;
                    low[i][2 * half + t] = floats_to_f16x2(fmaf(a, scale, -wide.x), fmaf(b, scale, -wide.y));
                }
            }
        }
    }
};

// The barriers of the ring's stages, and of the sums that the blocks of a cluster exchange.
struct Barriers {
    u32 full, empty, written, read;
    __device__ __forceinline__ explicit Barriers(u32 first)
        : full(first), empty(first + 8 * STAGES), written(first + 16 * STAGES), read(written + 8) {}
};

struct Consumer {
    const Params& p;
    const u32 stages;
    const Barriers barriers;
    const int row, lane;
    float sum[SUMS], acc[SUMS];
    Ring ring; // the stage that comes next
    Scale scale;

    // Waits for the next stage and makes its operand. Returns the factor for the sums of the stage before.
    __device__ __forceinline__ float prepare(Operand& operand) {
        barrier_wait(barriers.full + 8 * ring.slot, ring.parity);
        float v[TAP_PRODUCTS][2][4];
        load_terms(v, stages + ring.slot * STAGE_BYTES, row, lane % 4);
        const float factor = scale.fit(v, sum);
        operand.split(v, scale.value);
        return factor;
    }

    // Starts the products of a stage.
    __device__ __forceinline__ void multiply(const Operand& operand, int slot) {
        const u64 w = matrix_descriptor(stages + slot * STAGE_BYTES + X_BYTES, PART_BYTES / 2, 128);
        const auto part = [&](int i, int n) { return w + ((2 * i + n) * PART_BYTES >> 4); };
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < TAP_PRODUCTS; i++) wgmma(acc, operand.low[i], part(i, 0), i > 0);
#pragma unroll
        for (int i = 0; i < TAP_PRODUCTS; i++) wgmma(acc, operand.high[i], part(i, 1), 1);
#pragma unroll
        for (int i = 0; i < TAP_PRODUCTS; i++) wgmma(acc, operand.high[i], part(i, 0), 1);
        wgmma_commit();
    }

    // The products of `operand`; while they run, the operand after it, if there is one.
    __device__ __forceinline__ void step(const Operand& operand, Operand& next, bool more) {
        const int slot = ring.slot;
        multiply(operand, slot);
        ring.advance(STAGES);
        const float factor = more ? prepare(next) : 1;
        wgmma_wait();
#pragma unroll
        for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(acc[i])::"memory");
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers.empty + 8 * slot);
#pragma unroll
        for (int i = 0; i < SUMS; i++) sum[i] = fmaf(acc[i], factor, sum[i]);
    }

    __device__ __forceinline__ void sum_up(int steps) {
#pragma unroll
        for (int i = 0; i < SUMS; i++) sum[i] = 0;
        scale = Scale();
        if (steps == 0) return;
        Operand a, b;
        prepare(a);
#pragma unroll 1
        for (int i = 0;; i += 2) {
            step(a, b, i + 1 < steps);
            if (i + 1 >= steps) break;
            step(b, a, i + 2 < steps);
            if (i + 2 >= steps) break;
        }
    }
};

__device__ __forceinline__ void consume(const Params& p, int warp, int lane, u32 stages, const Barriers& barriers,
                                        Channels& channels, u32 scales) {
    const int rank = rank_in_cluster(), steps = first_step(p, rank + 1) - first_step(p, rank);
    Consumer consumer{p, stages, barriers, 16 * warp + lane / 4, lane};
    int k_loaded = -1; // block whose `channels` are there
    int round = 0;
    for (int tile = blockIdx.x / SPLIT; tile < p.tiles; tile += gridDim.x / SPLIT, round++) {
        const int m_block = p.k_blocks.divide(tile), k_block = tile - m_block * static_cast<int>(p.k_blocks.value);
        const Columns columns(p, k_block);
        if (k_block != k_loaded) channels.load(p, columns, lane);
        k_loaded = k_block;
        if (RESIDUAL) prefetch_residual<CHANNELS_LAST_OUT>(p, m_block * BLOCK_M, columns, 32 * warp + lane);
        consumer.sum_up(steps);
        const Rows rows(p, m_block * BLOCK_M + consumer.row);
        const float x_scale = consumer.scale.inverse();
        bool is_nan = false;
#if SPLIT == 1
        Added<4> added[COLUMNS_J / 4];
#pragma unroll
        for (int j = 0; j < COLUMNS_J; j += 4) added[j / 4].load(p, j, rows, columns, lane % 4);
#pragma unroll
        for (int j = 0; j < COLUMNS_J; j += 4)
            is_nan |= store(p, consumer.sum + 4 * j, added[j / 4], j, rows, columns, lane % 4, x_scale, channels);
#else
        Ring& ring = consumer.ring;
        barrier_wait(barriers.full + 8 * ring.slot, ring.parity);
        const Exchange exchange = {stages, scales, barriers.written, barriers.read, round};
        is_nan = exchange.store(p, consumer.sum, rows, columns, warp, lane, x_scale, channels);
        if (lane == 0) barrier_arrive(barriers.empty + 8 * ring.slot);
        ring.advance(STAGES);
#endif
        if (__any_sync(~0u, is_nan))
            store_plain_sums(p, m_block * BLOCK_M + 16 * warp, k_block, rank * (COLUMNS_J / SPLIT), COLUMNS_J / SPLIT, lane,
                             channels);
    }
}

extern "C" __global__ __launch_bounds__(384, 1)
#if SPLIT > 1
    __cluster_dims__(SPLIT, 1, 1)
#endif
        void KERNEL(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 stages = shared_address(shared);
    unsigned char* const behind = shared + STAGES * STAGE_BYTES;
    int2* const rows = reinterpret_cast<int2*>(behind);
    Channels* const channels = reinterpret_cast<Channels*>(behind + BLOCK_M * sizeof(int2));
    const u32 scales = shared_address(channels + CONSUMER_WARPS); // 16 bytes for each warp
    const Barriers barriers(scales + CONSUMER_WARPS * 16);

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(barriers.full + 8 * i, PRODUCERS + 1);
            barrier_init(barriers.empty + 8 * i, CONSUMER_WARPS);
        }
        barrier_init(barriers.written, SPLIT * CONSUMER_WARPS);
        barrier_init(barriers.read, SPLIT * CONSUMER_WARPS);
        barrier_init_fence();
    }
    if (SPLIT > 1)
        meet_cluster();
    else
        __syncthreads();

    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (group == 2) {
        give_registers<PRODUCER_REGISTERS>();
        produce(p, threadIdx.x - 256, rows, stages, barriers.full, barriers.empty);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        consume(p, 4 * group + warp, lane, stages, barriers, channels[4 * group + warp], scales);
    }
    if (SPLIT > 1) meet_cluster(); // nobody leaves while others read its sums
}
