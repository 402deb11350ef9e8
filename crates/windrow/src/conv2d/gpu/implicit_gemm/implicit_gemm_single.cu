// Like implicit_gemm.cu, but in one product: of f16 and bf16, and of f32 that is rounded to TF32. Both operands are in
// shared memory, sums are f32 and rounded once.
//
// A stage is 64 terms of a block's pixels and output channels, of f32 32, both in rows of 128 bytes that are swizzled as
// wgmma requires. x is channels-last with whole vectors of channels. The copy engine rounds f32 on its way.
//
// With STRIP a stage has half as many channels, in rows of 64 bytes, of a strip of pixels and, for each of the three columns
// of the filter, of the output channels. A strip is loaded once: what a column reads begins some rows further on. So rows of
// y have the pitch of all pixels that their first and last taps enclose, and the last of these pixels are none of y.
//
// A block has two consumer warpgroups, which multiply half of its pixels by all of its channels, and producers. SPLIT
// blocks of a cluster share the terms of a tile; then a block has one tile.
//
// Constants: ELEMENT_F16 or ELEMENT_BF16, or ELEMENT_F32 with TF32; EPILOGUE; RESIDUAL; FRAMES; GATHER 1 or 3, of f32 3;
// PADDED 0 or 1, of GATHER 1: taps may be outside the image; STRIP 0 or, of GATHER 3, 1; BLOCK_M 128 or 256, with STRIP 256;
// BLOCK_K 64, 128 or 256, with STRIP 64, 96, 128 or 192; SPLIT 1, 2, 4 or 8, with STRIP 1; STAGES; RESIDENT blocks of a
// multiprocessor; PRODUCERS 128 or, for GATHER 3, 32; OUT, as below.

#include "implicit_gemm_gather.cuh"

constexpr int M_TILES = BLOCK_M / 128; // of 64 pixels, of a consumer
constexpr int SUMS = BLOCK_K / 2;      // of a thread and tile
constexpr int COLUMNS_J = BLOCK_K / 8; // groups of 8 columns of the product
constexpr int SHARE = COLUMNS_J / SPLIT; // of them that a block stores
constexpr int STORE_MOST = TF32 ? 2 : 4, STORE_J = SHARE < STORE_MOST ? SHARE : STORE_MOST; // and at a time: 16 bytes
constexpr int STORES = SHARE / STORE_J;
// There are registers for the residual in addition to the sums: 168 if no warpgroup gives any away.
constexpr bool ADDS_EARLY = RESIDUAL && M_TILES * SUMS <= (PRODUCERS == 128 ? 128 : 64), ADDS_LATE = RESIDUAL && !ADDS_EARLY;

// How y is stored: elements of any strides; vectors of channels; for f16/bf16 vectors of four pixels.
#define ELEMENTS 0
#define CHANNEL_VECTORS 1
#define PIXEL_VECTORS 2

#if TF32
#define CHANNELS_LAST_OUT (OUT == CHANNEL_VECTORS)
#include "implicit_gemm_floats.cuh"

// A thread's pixels of a tile of 64.
struct Place : Rows {
    __device__ __forceinline__ Place(const Params& p, int row, int lane) : Rows(p, row + lane / 4) {}
};

// What is added to the outputs that `store` stores together.
struct Additions : Added<STORE_J> {
    __device__ __forceinline__ void load(const Params& p, int j0, const Place& place, const Columns& columns, int lane) {
        Added<STORE_J>::load(p, rank_in_cluster() * SHARE + j0, place, columns, lane % 4);
    }
};

// Stores the sums of column groups j0 to j0 + STORE_J of a block's share of a tile, sum[4 j + 2 t + e] (hopper.cuh).
__device__ __forceinline__ void store(const Params& p, const float* sum, const Additions& added, int j0, const Place& place,
                                      const Columns& columns, int lane, const float* bias) {
    constexpr int J = STORE_J;
    const int first = channel_of(lane % 4, rank_in_cluster() * SHARE + j0, 0);
#pragma unroll
    for (int t = 0; t < 2; t++) {
        float v[2 * J];
#pragma unroll
        for (int i = 0; i < 2 * J; i++) {
            const float y = sum[4 * (i / 2) + 2 * t + i % 2] + bias[first + i];
            v[i] = epilogue(RESIDUAL ? y + added.v[t][i] : y);
        }
        if (place.exists[t]) put<J>(p, v, place.y[t], columns.first + first, columns);
    }
}
#else
#include "implicit_gemm_halves.cuh"
#endif

struct Consumer {
    const Params& p;
    const u32 stages, full, empty;
    const int group, lane;
    float sum[M_TILES][SUMS];
    Ring ring;

    __device__ __forceinline__ void release(int slot) {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * slot);
    }

    __device__ __forceinline__ void sum_up(int steps) {
#pragma unroll
        for (int i = 0; i < M_TILES * SUMS; i++) sum[i / SUMS][i % SUMS] = 0;
        if (steps == 0) return;
        int previous = 0;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            barrier_wait(full + 8 * ring.slot, ring.parity);
            if (GATHER == CHANNELS) copy_out_fence(); // copies by threads of the producer come before the products
            const u32 stage = stages + ring.slot * STAGE_BYTES;
            const u64 x = swizzled_descriptor<ROW_BYTES>(stage + group * M_TILES * 64 * ROW_BYTES);
            const u64 w = swizzled_descriptor<ROW_BYTES>(stage + X_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < TAPS * TAP_PRODUCTS; i++) {
                const int tap = i / TAP_PRODUCTS, bytes = i % TAP_PRODUCTS * 32;
                const u64 x_tap = x + (tap * p.dilation_w * ROW_BYTES >> 4), w_tap = w + (tap * BLOCK_K * ROW_BYTES >> 4);
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
                    wgmma(sum[m], x_tap + ((m * 64 * ROW_BYTES + bytes) >> 4), w_tap + (bytes >> 4), 1);
            }
            wgmma_commit();
            if (step > 0) {
                wgmma_wait_but_one();
                release(previous);
            }
            previous = ring.slot;
            ring.advance(STAGES);
        }
        wgmma_wait();
        release(previous);
#pragma unroll
        for (int i = 0; i < M_TILES * SUMS; i++) asm volatile("" : "+f"(sum[i / SUMS][i % SUMS])::"memory");
    }

    // Adds up the sums of a cluster's blocks, in the order of the blocks, and stores them: each block a share of the columns.
    // The ring, which is empty by now, holds the sums of a block.
    __device__ __forceinline__ void exchange(const Additions (&added)[M_TILES][STORES], int row, const Columns& columns, int thread,
                                             const float* bias) {
        constexpr int J = STORE_J;
        const int rank = rank_in_cluster();
        const u32 mine = stages + thread * 16;
        asm volatile("bar.sync 2, 256;" ::: "memory"); // products of the other consumer have read it
#pragma unroll
        for (int i = 0; i < M_TILES * COLUMNS_J; i++) {
            const float* const s = sum[i / COLUMNS_J] + i % COLUMNS_J * 4;
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + i * 256 * 16), "f"(s[0]), "f"(s[1]), "f"(s[2]),
                         "f"(s[3]) : "memory");
        }
        meet_cluster();
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            const Place place(p, row + 64 * m, lane);
#pragma unroll
            for (int j0 = 0; j0 < SHARE; j0 += J) {
                float total[4 * J] = {};
                const int j = rank * SHARE + j0;
#pragma unroll
                for (int i = 0; i < SPLIT; i++) {
                    const u32 there = address_in(mine + (m * COLUMNS_J + j) * 256 * 16, i);
#pragma unroll
                    for (int l = 0; l < J; l++) {
                        const float4 v = load_there(there + l * 256 * 16);
                        total[4 * l] += v.x;
                        total[4 * l + 1] += v.y;
                        total[4 * l + 2] += v.z;
                        total[4 * l + 3] += v.w;
                    }
                }
                store(p, total, added[m][j0 / J], j0, place, columns, lane, bias);
            }
        }
    }
};

__device__ __forceinline__ void consume(const Params& p, int thread, u32 stages, u32 full, u32 empty, float* bias) {
    const int rank = rank_in_cluster(), steps = first_step(p, rank + 1) - first_step(p, rank);
    const int group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
    Consumer consumer{p, stages, full, empty, group, lane};
    bias += thread / 32 * BLOCK_K;
    int k_loaded = -1; // block whose bias is there
    for (int tile = blockIdx.x / SPLIT; tile < p.tiles; tile += gridDim.x / SPLIT) {
        const int m_block = p.k_blocks.divide(tile), k_block = tile - m_block * static_cast<int>(p.k_blocks.value);
        const Columns columns(p, k_block);
        if (k_block != k_loaded) {
            __syncwarp();
#pragma unroll
            for (int i = lane; i < BLOCK_K; i += 32) bias[i] = bias_of(p, columns, columns.first + i);
            __syncwarp();
        }
        k_loaded = k_block;
        const int row = m_block * BLOCK_M + group * M_TILES * 64 + 16 * warp;
        Additions added[M_TILES][STORES];
        if (ADDS_LATE) prefetch_residual<OUT == CHANNEL_VECTORS>(p, m_block * BLOCK_M, columns, thread);
#pragma unroll
        for (int i = 0; i < M_TILES * STORES; i++)
            if (ADDS_EARLY)
                added[i / STORES][i % STORES].load(p, i % STORES * STORE_J, Place(p, row + i / STORES * 64, lane), columns, lane);
        consumer.sum_up(steps);
#if SPLIT > 1
        consumer.exchange(added, row, columns, thread, bias);
#else
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            const Place place(p, row + 64 * m, lane);
#pragma unroll
            for (int i = 0; i < STORES; i++) {
                // These loads come ahead of the stores before, because the compiler moves no load past a store. The
                // first sums leave no registers for them.
                if (ADDS_LATE && i < 2) added[m][i].load(p, i * STORE_J, place, columns, lane);
                if (ADDS_LATE && i > 0 && i + 1 < STORES) added[m][i + 1].load(p, (i + 1) * STORE_J, place, columns, lane);
                store(p, consumer.sum[m] + 4 * STORE_J * i, added[m][i], i * STORE_J, place, columns, lane, bias);
            }
        }
#endif
    }
}

extern "C" __global__ __launch_bounds__(256 + PRODUCERS, RESIDENT)
#if SPLIT > 1
    __cluster_dims__(SPLIT, 1, 1)
#endif
        void KERNEL(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 stages = shared_address(shared);
    unsigned char* const behind = shared + STAGES * STAGE_BYTES;
    int2* const rows = reinterpret_cast<int2*>(behind);
    float* const bias = reinterpret_cast<float*>(behind + BLOCK_M * sizeof(int2)); // a copy for each warp
    const u32 full = shared_address(bias + CONSUMER_WARPS * BLOCK_K), empty = full + 8 * STAGES;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, GATHER == MAP ? 1 : PRODUCERS + 1);
            barrier_init(empty + 8 * i, CONSUMER_WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= 256) {
        if (PRODUCERS == 128) give_registers<40>();
        produce(p, threadIdx.x - 256, rows, stages, full, empty);
        if (SPLIT > 1) meet_cluster();
    } else {
        if (PRODUCERS == 128) take_registers<232>();
        consume(p, threadIdx.x, stages, full, empty, bias);
    }
    if (SPLIT > 1) meet_cluster(); // nobody leaves while others read its sums
}
