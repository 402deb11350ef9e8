// Convolution of channels-last images in groups of 8 to 64 channels, as products on tensor cores:
//
//     y[pixel, k] = sum over taps and input channels c of the group of x[pixel + tap, c] w[k, tap, c]
//
// Such a layer is limited by memory bandwidth if nothing is multiplied by the zeros between groups. A block copies the
// inputs of TILE_H x TILE_W outputs of TILE_N images into shared memory, for GROUPS groups. A warp multiplies by the filter
// of one group (operand B, in the order of group_products_filter.cu) the pixels of 16 rows and COLUMNS columns. The 16 pixels
// of one column are operand A, which lies in shared memory as it does in x. So the pixels of a column, once loaded, serve all
// taps of a row of the filter. The order of a sum is that of taps and channels, whatever the tile is.
//
// Products of f16 and bf16 are exact, f32 is rounded to TF32; sums are f32.
//
// Constants: those of group_products.cuh, EPILOGUE, RESIDUAL, STRIDE_H, STRIDE_W, DILATION_H, DILATION_W, TILE_N,
// TILE_H, TILE_W, GROUPS, COLUMNS, WARPS; BLOCKS of a multiprocessor; ALIGNED 0 or 1: x, y and the residual, and their strides,
// are aligned to 16 bytes.

#include "group_products.cuh"

constexpr int THREADS = 32 * WARPS;
// For compute capability 8.0 the assembler would spill registers for a fourth block.
constexpr int RESIDENT = WINDROW_PTX >= 900 ? BLOCKS : 3;
constexpr int VECTOR = 16 / sizeof(Element);
constexpr int VECTORS = GROUPS * GROUP_C / VECTOR; // of a pixel
constexpr int READ_H = (TILE_H - 1) * STRIDE_H + (FILTER_H - 1) * DILATION_H + 1;
constexpr int READ_W = (TILE_W - 1) * STRIDE_W + (FILTER_W - 1) * DILATION_W + 1;
constexpr int PIXEL_BYTES = 16 * VECTORS;
// Of a row in shared memory: an odd number of vectors, so that the pixels of 8 rows lie in different banks.
constexpr int ROW_BYTES = 16 * (READ_W * VECTORS | 1);
constexpr int ROWS = TILE_N * TILE_H;
// The parts of a block's work, one for a warp: of the rows, of the columns, and of a group's output channels.
constexpr int ROW_PARTS = (ROWS + 15) / 16;
constexpr int COLUMN_PARTS = (TILE_W + COLUMNS - 1) / COLUMNS;
constexpr int TILES = K_TILES < 4 ? K_TILES : 4; // of output channels
constexpr int K_PARTS = (K_TILES + TILES - 1) / TILES;
// Taps of a row whose filters are in registers.
constexpr int TAPS_AT_ONCE = FILTER_W < 3 ? FILTER_W : 3;

struct Params : ConvShape {
    const uint2* filter;
    int n, groups;
    Divisor channels, rows, columns; // blocks of an image
};
static_assert(PARAMS_AGREE, "as the host's structure");

__device__ __forceinline__ u32 address_of(const void* shared) {
    return static_cast<u32>(__cvta_generic_to_shared(shared));
}

// Copies a vector into shared memory, zeros unless it exists.
__device__ __forceinline__ void copy_vector(unsigned char* to, const Element* from, bool exists) {
#if ALIGNED
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address_of(to)), "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
#else
    Raw<T, VECTOR> raw = {};
    if (exists) raw.template load<1>(from);
    *reinterpret_cast<uint4*>(to) = make_uint4(raw.words[0], raw.words[1], raw.words[2], raw.words[3]);
#endif
}

// The tile's inputs, whose first one is at row `top` and column `left`. A thread rounds what it has copied itself, so that
// nobody waits in between.
__device__ __forceinline__ void copy_inputs(unsigned char* shared, const Params& p, int image0, int top, int left,
                                            int group0) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int vectors = min(GROUPS, p.groups - group0) * GROUP_C / VECTOR;
    for (int r = warp; r < TILE_N * READ_H; r += WARPS) {
        const int image = image0 + r / READ_H, row = top + r % READ_H;
        const bool row_exists = image < p.n && static_cast<u32>(row) < static_cast<u32>(p.h);
        const Element* const from = p.x + (image * p.x_n + row * p.x_h + left * p.x_w + group0 * GROUP_C);
#pragma unroll 4
        for (int i = lane; i < READ_W * VECTORS; i += 32) {
            const int column = i / VECTORS, vector = i % VECTORS;
            const bool exists = row_exists && vector < vectors && static_cast<u32>(left + column) < static_cast<u32>(p.w);
            copy_vector(shared + r * ROW_BYTES + 16 * i, exists ? from + (column * p.x_w + vector * VECTOR) : p.x, exists);
        }
    }
#if ALIGNED
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
#ifdef ELEMENT_F32
    for (int r = warp; r < TILE_N * READ_H; r += WARPS) {
#pragma unroll 4
        for (int i = lane; i < READ_W * VECTORS; i += 32) {
            float4* const at = reinterpret_cast<float4*>(shared + r * ROW_BYTES + 16 * i);
            const float4 v = *at;
            *reinterpret_cast<uint4*>(at) =
                make_uint4(float_to_tf32(v.x), float_to_tf32(v.y), float_to_tf32(v.z), float_to_tf32(v.w));
        }
    }
#endif
}

// Operand A of 16 pixels: the channels of a whole product, or 8. Not volatile, so that one load need not wait for another.
template <bool WHOLE> __device__ __forceinline__ void load_pixels(u32 (&a)[4], u32 from) {
    if constexpr (WHOLE) {
        asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from));
    } else {
        asm("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(a[0]), "=r"(a[1]) : "r"(from));
    }
}

template <bool WHOLE> __device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], uint2 b) {
#ifdef ELEMENT_F32
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
#else
    if constexpr (WHOLE) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
    } else {
        asm("mma.sync.aligned.m16n8k8.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 "
            "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(b.x));
    }
#endif
}

// The sums of a warp: for each of its columns and tiles of output channels, two of the tile's columns in two rows.
typedef float Sums[COLUMNS][TILES][4];

// Adds the products of one step of channels for `taps` taps of a row of the filter. `from` is the operand of the first
// column and tap, `filter` that of the first tap, of which `tiles` exist.
template <bool WHOLE>
__device__ __forceinline__ void add_step(Sums& sums, u32 from, const uint2* filter, int taps, int tiles) {
    uint2 b[TAPS_AT_ONCE][TILES];
#pragma unroll
    for (int s = 0; s < TAPS_AT_ONCE; s++) {
#pragma unroll
        for (int k = 0; k < TILES; k++) {
            const bool exists = (FILTER_W % TAPS_AT_ONCE == 0 || s < taps) && (K_TILES % TILES == 0 || k < tiles);
            if (exists) b[s][k] = __ldg(filter + 32 * (s * STEPS * K_TILES + k));
        }
    }
#pragma unroll
    for (int column = 0; column <= (COLUMNS - 1) * STRIDE_W + (TAPS_AT_ONCE - 1) * DILATION_W; column++) {
        u32 a[4];
        bool is_loaded = false;
#pragma unroll
        for (int s = 0; s < TAPS_AT_ONCE; s++) {
            const int from_tap = column - s * DILATION_W, t = from_tap / STRIDE_W;
            if (from_tap < 0 || from_tap % STRIDE_W != 0 || t >= COLUMNS) continue;
            if (!is_loaded) load_pixels<WHOLE>(a, from + column * PIXEL_BYTES);
            is_loaded = true;
            if (FILTER_W % TAPS_AT_ONCE != 0 && s >= taps) continue;
#pragma unroll
            for (int k = 0; k < TILES; k++)
                if (K_TILES % TILES == 0 || k < tiles) multiply<WHOLE>(sums[t][k], a, b[s][k]);
        }
    }
}

// Neighbouring outputs of a pixel.
template <int N> struct Outputs {
    static constexpr int ACCESS = ALIGNED ? N : 1;
    Raw<T, N> raw = {};

    __device__ __forceinline__ void load_residual(const Params& p, const Element* to) {
        if (RESIDUAL) raw.template load<ACCESS>(beside(p.residual, p.y, to));
    }
    __device__ __forceinline__ void store(Element* to, const float (&sums)[N], const float* bias) {
        float v[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] = sums[i] + bias[i];
            v[i] = epilogue(RESIDUAL ? v[i] + raw.get(i) : v[i]);
        }
        raw.pack(v);
        raw.template store<ACCESS>(to);
    }
};

// Stores a warp's sums of one pixel, `row` 0 or 1 of a lane's two, from the output channel at `to` on.
__device__ __forceinline__ void store_pixel(const Params& p, Element* to, const float (&sums)[TILES][4], int row,
                                            const float* bias, int tiles) {
    const int q = threadIdx.x % 4;
    constexpr int PAIRS = (TILES + 1) / 2;
    Outputs<4> quads[PAIRS];
    Outputs<2> last;
    // All loads before the first store, as the compiler keeps their order.
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        if (2 * i + 1 < tiles) quads[i].load_residual(p, to + 16 * i + 4 * q);
        if (2 * i + 1 == tiles) last.load_residual(p, to + 16 * i + 2 * q);
    }
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const float* const a = sums[2 * i] + 2 * row;
        const float* const b = sums[2 * i + 1 < TILES ? 2 * i + 1 : 2 * i] + 2 * row;
        if (2 * i + 1 < tiles) {
            const float four[4] = {a[0], a[1], b[0], b[1]};
            quads[i].store(to + 16 * i + 4 * q, four, bias + 4 * i);
        }
        if (2 * i + 1 == tiles) {
            const float two[2] = {a[0], a[1]};
            last.store(to + 16 * i + 2 * q, two, bias + 4 * i);
        }
    }
}

extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) void KERNEL(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    const auto rest = [](int n, const Divisor& by, int quotient) { return n - quotient * static_cast<int>(by.value); };
    const int tile = p.channels.divide(blockIdx.x), group0 = rest(blockIdx.x, p.channels, tile) * GROUPS;
    const int strip = p.columns.divide(tile), column0 = rest(tile, p.columns, strip) * TILE_W;
    const int images = p.rows.divide(strip), row0 = rest(strip, p.rows, images) * TILE_H;
    const int image0 = images * TILE_N;
    copy_inputs(shared, p, image0, row0 * STRIDE_H - p.pad_h, column0 * STRIDE_W - p.pad_w, group0);
    __syncthreads();
    // Loads of operands may change places with others, but not before this.
    u32 inputs = address_of(shared);
    asm volatile("" : "+r"(inputs));

    const int lane = threadIdx.x % 32;
    for (int item = threadIdx.x / 32; item < GROUPS * K_PARTS * COLUMN_PARTS * ROW_PARTS; item += WARPS) {
        const int slot = item % GROUPS, group = group0 + slot, k_tile = item / GROUPS % K_PARTS * TILES;
        const int column = item / (GROUPS * K_PARTS) % COLUMN_PARTS * COLUMNS;
        const int first_row = item / (GROUPS * K_PARTS * COLUMN_PARTS) * 16;
        if (group >= p.groups) continue;
        const int tiles = min(TILES, K_TILES - k_tile);

        const int mine = min(first_row + lane % 16, ROWS - 1);
        u32 from = inputs + (mine / TILE_H * READ_H + mine % TILE_H * STRIDE_H) * ROW_BYTES + column * STRIDE_W * PIXEL_BYTES +
                   slot * (GROUP_C * static_cast<int>(sizeof(Element))) + lane / 16 * 16;
        Sums sums = {};
        const uint2* filter = p.filter + (static_cast<i64>(group) * (TAPS * STEPS * K_TILES) + k_tile) * 32 + lane;
// Loops, as more loads ahead than those of a step have no registers.
#pragma unroll 1
        for (int r = 0; r < FILTER_H; r++) {
#pragma unroll 1
            for (int s = 0; s < FILTER_W; s += TAPS_AT_ONCE) {
                u32 at = from + s * DILATION_W * PIXEL_BYTES;
                const uint2* step = filter + 32 * K_TILES * STEPS * s;
#pragma unroll 1
                for (int i = 0; i < WHOLE_STEPS; i++, at += 32, step += 32 * K_TILES)
                    add_step<true>(sums, at, step, FILTER_W - s, tiles);
                if (STEPS > WHOLE_STEPS) add_step<false>(sums, at, step, FILTER_W - s, tiles);
            }
            from += DILATION_H * ROW_BYTES;
            filter += 32 * K_TILES * STEPS * FILTER_W;
        }

        const int k0 = group * GROUP_K + k_tile * 8;
        float bias[2 * TILES];
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            const int channel = i / 4 * 16 + (i / 4 * 2 + 1 < tiles ? 4 : 2) * (lane % 4) + i % 4;
            bias[i] = i / 2 < tiles ? bias_at(p, k0 + channel) : 0;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = first_row + half * 8 + lane / 4, image = image0 + i / TILE_H, row = row0 + i % TILE_H;
            if (i >= ROWS || image >= p.n || row >= p.oh) continue;
            Element* const to = p.y + (image * p.y_n + row * p.y_h + (column0 + column) * p.y_w + k0);
#pragma unroll
            for (int t = 0; t < COLUMNS; t++) {
                if (COLUMN_PARTS * COLUMNS > TILE_W && column + t >= TILE_W || column0 + column + t >= p.ow) break;
                store_pixel(p, to + t * p.y_w, sums[t], half, bias, K_TILES % TILES == 0 ? TILES : tiles);
            }
        }
    }
}
