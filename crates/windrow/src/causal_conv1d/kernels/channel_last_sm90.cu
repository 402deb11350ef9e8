// y on Hopper where channels lie next to each other in x and y and rows of channels are whole 16-byte
// vectors; one sequence a row, 2 <= WIDTH <= 5.
//
// Floor: x once in, y once out. The copy engine brings a tile of ROWS positions into shared memory and takes
// it away again, computed in place: registers hold the arithmetic of one position, and memory sees pieces
// of THREADS * VECTOR elements. The WIDTH - 1 positions before a tile come from L2.
//
// VECTOR   channels of a thread
// ROWS     positions of a tile, at most 32
#include "causal_conv1d.cuh"
#include "copy_engine_sm90.cuh"

constexpr int HALO = WIDTH - 1, COLUMNS = THREADS * VECTOR;
typedef Raw<T, VECTOR> Vector;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) KERNEL(const Params p) {
    wait_for_previous();
    __shared__ alignas(128) S tile[ROWS][COLUMNS];
    __shared__ alignas(8) unsigned long long full[1];
    i64 first = (i64)blockIdx.x * COLUMNS, d = first + threadIdx.x * VECTOR, b = blockIdx.z;
    int start = blockIdx.y * ROWS, rows = min((int)p.length - start, ROWS), lane = threadIdx.x;
    i64 columns = p.channels - first < COLUMNS ? p.channels - first : COLUMNS;
    unsigned bytes = (unsigned)columns * sizeof(S), barrier = shared_address(full);
    const S *x = p.x + b * p.x_stride[0] + first + start * p.x_stride[2];
    S *y = p.y + b * p.y_stride[0] + first + start * p.y_stride[2];
    if (threadIdx.x == 0) {
        barriers_init(full);
        barrier_expect(barrier, rows * bytes);
    }
    __syncthreads();
    // Thread r carries row r.
    if (lane < rows) copy_in(shared_address(tile[lane]), x + lane * p.x_stride[2], bytes, barrier);

    bool active = d < p.channels;
    float weight[WIDTH][VECTOR], bias[VECTOR], window[HALO][VECTOR];
    if (active) {
        weights_at(p, d, weight);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) bias[i] = bias_at(p, d + i);
#pragma unroll
        for (int j = 0; j < HALO; j++) {
            Vector v = {};
            int row = j - HALO;
            if (start + row >= 0) {
                v.template load<VECTOR>(x + threadIdx.x * VECTOR + row * p.x_stride[2]);
            }
            v.unpack(window[j]);
        }
    }
    barrier_wait(barrier, 0);
    // Rows past the end are computed from what lies there, and stay.
    if (active) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            Vector v;
            v.template load<VECTOR>(&tile[r][threadIdx.x * VECTOR]);
            float now[VECTOR], out[VECTOR];
            v.unpack(now);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                float sum = fmaf(weight[HALO][i], now[i], bias[i]);
#pragma unroll
                for (int j = 1; j <= HALO; j++) {
                    sum = fmaf(weight[HALO - j][i], window[HALO - j][i], sum);
                }
                out[i] = finish(sum);
#pragma unroll
                for (int j = 0; j + 1 < HALO; j++) window[j][i] = window[j + 1][i];
                window[HALO - 1][i] = now[i];
            }
            v.pack(out);
            v.template store<VECTOR>(&tile[r][threadIdx.x * VECTOR]);
        }
    }
    copy_out_fence();
    __syncthreads();
    if (lane >= rows) return;
    copy_out(y + lane * p.y_stride[2], shared_address(tile[lane]), bytes);
    copy_out_wait();
}
