// The output of implicit_gemm.cu: from the sums in a thread's registers to y.

#include "implicit_gemm_floats.cuh"

constexpr int SUMS = BLOCK_K / 2;    // of a thread
constexpr int COLUMNS_J = BLOCK_K / 8; // groups of 8 columns of the product

// What the epilogue needs of a block's output channels, one copy for each warp.
struct Channels {
    float scale[BLOCK_K];
    float bias[BLOCK_K];

    __device__ __forceinline__ void load(const Params& p, const Columns& columns, int lane) {
        __syncwarp();
#pragma unroll
        for (int i = lane; i < BLOCK_K; i += 32) {
            const int k = columns.first + i;
            bias[i] = bias_of(p, columns, k);
            scale[i] = k < columns.end ? p.filter_inverse[k] : 0;
        }
        __syncwarp();
    }
};

// Undoes the exponents that operands were scaled to. What is left of the scales are powers of two next to the largest input
// and the largest tap: their product is as large as outputs are.
constexpr float SHRINK = 1.0f / (1u << (INPUT_EXPONENT + FILTER_EXPONENT));

// Stores the sums of columns j0 to j0 + J: 2 J neighbouring channels of two pixels, sum[4 j + 2 t + e] (hopper.cuh). True
// if one is NaN.
template <int J>
__device__ __forceinline__ bool store(const Params& p, const float* sum, const Added<J>& added, int j0, const Rows& rows,
                                      const Columns& columns, int q, float x_scale, const Channels& channels) {
    const int first = channel_of(q, j0, 0), k = columns.first + first;
    bool is_nan = false;
#pragma unroll
    for (int t = 0; t < 2; t++) {
        float v[2 * J];
#pragma unroll
        for (int i = 0; i < 2 * J; i++) {
            const float scale = channels.scale[first + i] * x_scale;
            const float y = fmaf(sum[4 * (i / 2) + 2 * t + i % 2] * SHRINK, scale, channels.bias[first + i]);
            is_nan |= y != y;
            v[i] = epilogue(RESIDUAL ? y + added.v[t][i] : y);
        }
        if (!rows.exists[t]) continue;
        put<J>(p, v, rows.y[t], k, columns);
    }
    return is_nan;
}

// ---- sums of a cluster ----

// A warp arrives at a barrier of every block of the cluster.
__device__ __forceinline__ void arrive_everywhere(u32 barrier, int lane) {
    __syncwarp();
    if (lane < SPLIT)
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, lane)) : "memory");
}

__device__ __forceinline__ void wait_for_cluster(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}

// Adds up the sums of a cluster's blocks, in the order of the blocks, and stores them: each block a share of the columns. A
// stage of the ring holds the sums of a block.
struct Exchange {
    u32 stages, scales, written, read; // addresses, also of barriers
    int round;

    // Blocks of more steps are further on in their ring.
    static __device__ __forceinline__ u32 stage_of(const Params& p, int rank, int round) {
        const int steps = first_step(p, rank + 1) - first_step(p, rank);
        return (round * (steps + 1) + steps) % STAGES * STAGE_BYTES;
    }

    // True if a sum is NaN.
    __device__ __forceinline__ bool store(const Params& p, const float (&sum)[SUMS], const Rows& rows, const Columns& columns,
                                          int warp, int lane, float x_scale, const Channels& channels) const {
        constexpr int SHARE = COLUMNS_J / SPLIT, J = SHARE < 4 ? SHARE : 4;
        bool is_nan = false;
        const int rank = rank_in_cluster();
        const u32 first = stages + (32 * warp + lane) * 16, mine = first + stage_of(p, rank, round);
#pragma unroll
        for (int j = 0; j < COLUMNS_J; j++)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + j * 256 * 16), "f"(sum[4 * j]),
                         "f"(sum[4 * j + 1]), "f"(sum[4 * j + 2]), "f"(sum[4 * j + 3]) : "memory");
        const u32 my_scale = scales + 16 * warp;
        if (lane == 0) asm volatile("st.shared.v4.f32 [%0], {%1, %1, %1, %1};" ::"r"(my_scale), "f"(x_scale) : "memory");
        arrive_everywhere(written, lane);
        wait_for_cluster(written, round & 1);
        float factor[SPLIT], largest = 0;
#pragma unroll
        for (int i = 0; i < SPLIT; i++) {
            factor[i] = load_there(address_in(my_scale, i)).x;
            largest = fmaxf(largest, factor[i]);
        }
#pragma unroll
        for (int i = 0; i < SPLIT; i++) factor[i] /= largest;
#pragma unroll
        for (int j0 = 0; j0 < SHARE; j0 += J) {
            float total[4 * J] = {};
            const int j = rank * SHARE + j0;
            Added<J> added;
            added.load(p, j, rows, columns, lane % 4);
#pragma unroll
            for (int i = 0; i < SPLIT; i++) {
                const u32 there = address_in(first + stage_of(p, i, round), i);
#pragma unroll
                for (int l = 0; l < J; l++) {
                    const float4 v = load_there(there + (j + l) * 256 * 16);
                    total[4 * l] = fmaf(v.x, factor[i], total[4 * l]);
                    total[4 * l + 1] = fmaf(v.y, factor[i], total[4 * l + 1]);
                    total[4 * l + 2] = fmaf(v.z, factor[i], total[4 * l + 2]);
                    total[4 * l + 3] = fmaf(v.w, factor[i], total[4 * l + 3]);
                }
            }
            is_nan |= ::store(p, total, added, j, rows, columns, lane % 4, largest, channels);
        }
        arrive_everywhere(read, lane);
        wait_for_cluster(read, round & 1);
        return is_nan;
    }
};
