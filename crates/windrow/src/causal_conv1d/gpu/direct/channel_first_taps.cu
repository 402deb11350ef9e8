// y where positions lie next to each other in x and y (stride 1 along l), one sequence per row, 2 <= TAPS <= 256,
// length < 2^30.
//
// Floor: x once in, y once out, or TAPS products per element where that is longer. A warp walks along `chunk` positions
// of a row, TILES tiles of 128 per step. It stores them in shared memory after the inputs before them, while the next
// ones are on their way. A thread sums quads of neighbouring positions, four taps per step.
//
// MATRIX: f16/bf16 with weights of their type on tensor cores, with f32 sums. A tile is a product: row m of the left
// matrix are the inputs 8 m + k, k < 16 STEPS, of which a word of a thread is the pair at 2 (lane + 4 j) from where the
// tile's inputs begin; the right matrix has the taps, shifted by one from column to column, and zeros; element n of row
// m is output 8 m + n. Zeros times what is not finite are not 0: a step that meets such inputs sums in plain steps.
//
// TAPS     number of taps
// TILES    tiles of a step
// MATRIX   whether products of matrices are taken
// MATRIX_TYPE, EXPONENT   what PTX calls their elements, and an element's bits of the exponent
#include "vector.cuh"

constexpr int THREADS = 128, HALO = TAPS - 1, QUADS = (TAPS + 3) / 4, STEPS = (HALO + 8 + 15) / 16;
// Inputs before a step's, positions of a step and with what lies before them.
constexpr int PAD = MATRIX ? 16 * STEPS - 8 : (4 * QUADS + VECTOR - 1) / VECTOR * VECTOR, SPAN = 128 * TILES,
              ALL = PAD + SPAN;
static_assert(PAD <= SPAN, "one step's inputs lie before the next one's");
// Neighbouring outputs of a thread.
constexpr int OUT = MATRIX ? 2 : 4;
typedef Raw<T, 4> Quad;

#if MATRIX
__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&early)[2], const unsigned (&late)[2],
                                         const unsigned (&taps)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." MATRIX_TYPE "." MATRIX_TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(early[0]), "r"(late[0]), "r"(early[1]), "r"(late[1]), "r"(taps[0]), "r"(taps[1]));
}

// Not 0 if one of two f16/bf16 numbers is infinite or NaN.
__device__ __forceinline__ unsigned wildness(unsigned word) {
    constexpr unsigned ALL_ONES = EXPONENT << 16 | EXPONENT, LAST = 0x80008000u - ALL_ONES;
    return (word & ALL_ONES) + LAST & 0x80008000u;
}

// Words of 4 steps before the present one, and of it: rows 8 to 15 of a tile read what rows 0 to 7 read 4 steps later,
// the next tile 8 steps later.
__device__ __forceinline__ void multiply_tiles(const S *inputs, const unsigned (&taps)[STEPS][2], float (&sum)[TILES][4]) {
    unsigned word[5][2];
#pragma unroll
    for (int i = 0; i < STEPS + 4 + 8 * (TILES - 1); i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            word[i % 5][h] = *(const unsigned *)(inputs + 2 * ((int)threadIdx.x % 32 + 8 * i + 4 * h));
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            int step = i - 4 - 8 * tile;
            if (step >= 0 && step < STEPS) multiply(sum[tile], word[(i + 1) % 5], word[i % 5], taps[step]);
        }
    }
}
#endif

// N taps, the earliest first, on the quads before and at the positions of `sum`.
template <int N>
__device__ __forceinline__ void add(const float *weight, const Quad (&before)[TILES], const Quad (&at)[TILES],
                                    float (&sum)[TILES][4]) {
    float4 four = *(const float4 *)weight;
    float w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        float in[8];
#pragma unroll
        for (int i = 0; i < 4; i++) in[i] = before[tile].get(i), in[4 + i] = at[tile].get(i);
#pragma unroll
        for (int j = N - 1; j >= 0; j--) {
#pragma unroll
            for (int i = 0; i < 4; i++) sum[tile][i] = fmaf(w[j], in[4 + i - j], sum[tile][i]);
        }
    }
}

__device__ __forceinline__ void quads(const S *inputs, Quad (&out)[TILES]) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) out[tile].template load<4>(inputs + 128 * tile);
}

__device__ __forceinline__ unsigned wildness(const Vector &v) {
    unsigned wild = 0;
#if MATRIX
#pragma unroll
    for (int i = 0; i < 4; i++) wild |= wildness(v.words[i]);
#endif
    return wild;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) KERNEL(const Params p) {
    wait_for_previous();
    __shared__ __align__(16) S shared[THREADS / 32][ALL];
    // The latest tap first.
    __shared__ __align__(16) float shared_weights[THREADS / 32][4 * QUADS];
    int lane = threadIdx.x % 32, across = blockDim.x / 32, warp = threadIdx.y * across + threadIdx.x / 32;
    S *inputs = shared[warp], *own = inputs + lane * VECTOR;
    float *weights = shared_weights[warp];
    i64 d = (i64)blockIdx.y * blockDim.y + threadIdx.y, b = blockIdx.z;
    if (d >= p.channels) return;
    int length = (int)p.length;
    Output output = output_of(p, d);
    S *y = output.y + b * output.stride[0] + d * output.stride[1];
    // Vectors start where y is aligned; the first one of a misaligned row is cut short.
    int lead = (int)((unsigned long long)y / sizeof(S) % VECTOR);
    int start = (blockIdx.x * across + threadIdx.x / 32) * (int)p.chunk - lead;
    if (start >= length) return;
    int stop = min(start + (int)p.chunk, length);
    const S *x = p.x + b * p.x_stride[0] + d * p.x_stride[1];
    bool aligned = is_aligned<VECTOR>(x - lead);
    constexpr int LOADS = SPAN / VECTOR / 32, EACH = 32 * VECTOR;
    Vector in[LOADS];
    auto load = [&] {
        bool whole = aligned && start >= 0 && start + SPAN <= length;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int t = start + lane * VECTOR + i * EACH;
            if (whole) in[i].template load<VECTOR>(x + t);
            else in[i] = load_vector(x, t, length, aligned);
        }
    };
    load();
    unsigned wild_before = 0;
    for (int at = lane * VECTOR; at < PAD; at += EACH) {
        Vector v = load_vector(x, start - PAD + at, length, aligned);
        v.template store<VECTOR>(inputs + at);
        wild_before |= wildness(v);
    }
    for (int j = lane; j < TAPS; j += 32) weights[j] = weight_at(p, d, HALO - j);
    float bias = bias_at(p, d);
    __syncwarp();
#if MATRIX
    // Element k of column n: the tap on an input PAD + n - k positions back.
    unsigned taps[STEPS][2];
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) {
        int back = PAD + lane / 4 - (8 * i + lane % 4 * 2);
        float first = back >= 0 && back <= HALO ? weights[back] : 0.0f;
        float second = back >= 1 && back <= HALO + 1 ? weights[back - 1] : 0.0f;
        taps[i / 2][i % 2] = T::pack(first, second);
    }
#endif
#pragma unroll 1
    while (true) {
        unsigned wild = 0;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            in[i].template store<VECTOR>(own + PAD + i * EACH);
            wild |= wildness(in[i]);
        }
        __syncwarp();
        S *out = y + start;
        int from = -start, to = length - start;
        start += SPAN;
        if (start < stop) load();
        float sum[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = bias;
#if MATRIX
        if (!__any_sync(0xffffffff, wild | wild_before)) {
            multiply_tiles(inputs, taps, sum);
        } else {
#pragma unroll 1
            for (int j = 0; j < TAPS; j++) {
#pragma unroll
                for (int i = 0; i < 4 * TILES; i++) {
                    float v = T::to_float(inputs[PAD + i / 2 * 64 + 2 * lane + i % 2 - j]);
                    sum[i / 4][i % 4] = fmaf(weights[j], v, sum[i / 4][i % 4]);
                }
            }
        }
        wild_before = wild;
#else
        Quad at[TILES], before[TILES];
        constexpr int WHOLE = TAPS / 4, REST = TAPS % 4;
        const S *quad = inputs + PAD + 4 * lane - 4 * WHOLE;
        quads(quad, at);
        if constexpr (REST > 0) {
            quads(quad - 4, before);
            add<REST>(weights + 4 * WHOLE, before, at, sum);
        }
#pragma unroll(WHOLE <= 4 ? 4 : 2)
        for (int k = WHOLE - 1; k >= 0; k--) {
#pragma unroll
            for (int i = 0; i < TILES; i++) before[i] = at[i];
            quads(quad + 4 * (WHOLE - k), at);
            add<4>(weights + 4 * k, before, at, sum);
        }
#endif
        bool whole = from <= 0 && to >= SPAN;
#pragma unroll
        for (int i = 0; i < 4 * TILES / OUT; i++) {
            int at = (32 * i + lane) * OUT;
            float values[OUT];
#pragma unroll
            for (int j = 0; j < OUT; j++) values[j] = finish(sum[(i * OUT + j) / 4][(i * OUT + j) % 4]);
            Raw<T, OUT> v;
            v.pack(values);
            if (whole || at >= from && at + OUT <= to) {
                v.template store<OUT>(out + at);
            } else {
#pragma unroll
                for (int j = 0; j < OUT; j++) {
                    if (at + j >= from && at + j < to) out[at + j] = v.stored(j);
                }
            }
        }
        if (start >= stop) return;
        __syncwarp();
        // The last inputs lie before the next step's.
        for (int at = lane * VECTOR; at < PAD; at += EACH) {
            Vector v;
            v.template load<VECTOR>(inputs + SPAN + at);
            v.template store<VECTOR>(inputs + at);
        }
        __syncwarp();
    }
}
