// y on Hopper where channels lie next to each other in x and y and rows of channels are whole 16-byte
// vectors; one sequence per row, 2 <= WIDTH <= 16.
//
// Floor: x once in, y once out. The copy engine brings a tile of ROWS positions into shared memory and takes
// it away again, computed in place: registers hold the arithmetic of one position, and memory sees pieces
// of LANES * VECTOR elements. The WIDTH - 1 positions before a tile come from L2.
//
// VECTOR   channels of a thread
// ROWS     positions of a thread
// LANES    threads along the channels; fewer than THREADS only where all channels are theirs and rows lie one behind the
//          other: then groups of threads have tiles one behind the other, each of which is one piece of memory
#include "causal_conv1d.cuh"
#include "copy_engine_sm90.cuh"

constexpr int HALO = WIDTH - 1, COLUMNS = LANES * VECTOR, GROUPS = THREADS / LANES;
// Tiles of groups lie a row apart, so that they begin in other banks of shared memory.
constexpr int PITCH = GROUPS > 1 ? ROWS + 1 : ROWS;
typedef Raw<T, VECTOR> Vector;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) KERNEL(const Params p) {
    wait_for_previous();
    __shared__ alignas(128) S tiles[GROUPS][PITCH][COLUMNS];
    __shared__ alignas(8) unsigned long long full[1];
    int thread = threadIdx.x, lane = thread % LANES, group = thread / LANES;
    i64 first = (i64)blockIdx.x * COLUMNS, d = first + lane * VECTOR, b = blockIdx.z;
    int begin = blockIdx.y * GROUPS * ROWS, rows = min((int)p.length - begin, GROUPS * ROWS);
    unsigned columns = (unsigned)(p.channels - first < COLUMNS ? p.channels - first : COLUMNS);
    // Thread i carries piece i: a row, or a group's rows.
    constexpr int PIECE = GROUPS > 1 ? ROWS : 1;
    int mine = min(rows - thread * PIECE, PIECE);
    bool carries = thread < GROUPS * ROWS / PIECE && mine > 0;
    unsigned barrier = shared_address(full), bytes = mine * columns * sizeof(S);
    unsigned piece = shared_address(&tiles[GROUPS > 1 ? thread : 0][GROUPS > 1 ? 0 : thread][0]);
    const S *x = p.x + b * p.x_stride[0] + first + begin * p.x_stride[2];
    S *y = p.y + b * p.y_stride[0] + first + begin * p.y_stride[2];
    if (thread == 0) {
        barriers_init(full);
        barrier_expect(barrier, rows * columns * sizeof(S));
    }
    __syncthreads();
    if (carries) copy_in(piece, x + thread * PIECE * p.x_stride[2], bytes, barrier);

    int start = group * ROWS;
    bool active = d < p.channels && start < rows;
    float weight[WIDTH][VECTOR], bias[VECTOR], window[HALO][VECTOR];
    if (active) {
        weights_at(p, d, weight);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) bias[i] = bias_at(p, d + i);
#pragma unroll
        for (int j = 0; j < HALO; j++) {
            Vector v = {};
            int row = start + j - HALO;
            if (begin + row >= 0) v.template load<VECTOR>(x + lane * VECTOR + row * p.x_stride[2]);
            v.unpack(window[j]);
        }
    }
    barrier_wait(barrier, 0);
    // Rows past the end are computed from what lies there, and stay.
    if (active) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            S *own = &tiles[group][r][lane * VECTOR];
            Vector v;
            v.template load<VECTOR>(own);
            float now[VECTOR], out[VECTOR];
            v.unpack(now);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                float sum = sum_taps<WIDTH>(
                    bias[i], WIDTH, [&](int k) { return weight[k][i]; },
                    [&](int k) { return k == HALO ? now[i] : window[k][i]; });
                out[i] = finish(sum);
#pragma unroll
                for (int j = 0; j + 1 < HALO; j++) window[j][i] = window[j + 1][i];
                window[HALO - 1][i] = now[i];
            }
            v.pack(out);
            normalise(p, d, v);
            v.template store<VECTOR>(own);
        }
    }
    copy_out_fence();
    __syncthreads();
    if (!carries) return;
#if OUTPUTS > 1
    static_assert(GROUPS == 1, "a piece is a row");
    for_each_part(p, first, first + columns, [&](const Output &output, i64 low, i64 high) {
        y = output.y + b * output.stride[0] + low + (begin + thread) * output.stride[2];
        copy_out(y, piece + (unsigned)((low - first) * sizeof(S)), (unsigned)((high - low) * sizeof(S)));
    });
#else
    copy_out(y + thread * PIECE * p.y_stride[2], piece, bytes);
#endif
    copy_out_wait();
}
