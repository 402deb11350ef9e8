// Serving on Hopper where sequences are long, y is not x, and rows of channels are whole 16-byte vectors;
// 2 <= TAPS <= 5.
//
// Floor: x once in, y once out. The copy engine brings a piece of ROWS tokens of one sequence into shared memory and
// takes it away again, computed in place. Pieces are counted as in serving_chunks.cu.
//
// THREADS  of a block
// ROWS     tokens of a piece, at least TAPS - 1 and at most 32
#include "serving_pieces.cuh"
#include "copy_engine_sm90.cuh"

constexpr int COLUMNS = THREADS * VECTOR;
static_assert(ROWS <= 32, "a lane carries a row");

// The sequence of a piece, by all lanes of a warp; negative if there is none.
__device__ __forceinline__ int sequence_of(const Params &p, int piece) {
    int found = -1;
    for (int i = threadIdx.x % 32; i < (int)p.sequences; i += 32) {
        if (first_piece(p, i) <= piece && piece < first_piece(p, i + 1)) found = i;
    }
    return __reduce_max_sync(0xffffffff, found);
}

// Keeps weights and bias as f32: otherwise the compiler unpacks them from f16 or bf16 again for each token.
__device__ __forceinline__ void keep_unpacked(Taps &taps) {
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
#pragma unroll
        for (int k = 0; k < TAPS; k++) asm("" : "+f"(taps.weight[k][i]));
        asm("" : "+f"(taps.bias[i]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) KERNEL(const Params p) {
    wait_for_previous();
    __shared__ alignas(128) S tile[ROWS][COLUMNS];
    __shared__ alignas(8) unsigned long long full[1];
    int first = blockIdx.x * COLUMNS, d = first + threadIdx.x * VECTOR, piece = blockIdx.y, lane = threadIdx.x;
    bool inside = d < (int)p.channels;
    int i = sequence_of(p, piece), t = 0;
    Tokens tokens = {};
    if (i >= 0) {
        tokens = tokens_of(p, i);
        t = (piece - first_piece(p, i)) * ROWS;
    }
    if (t < tokens.count) {
        int rows = min(tokens.count - t, ROWS);
        int columns = min((int)p.channels - first, COLUMNS);
        unsigned bytes = (unsigned)columns * sizeof(S), barrier = shared_address(full);
        const S *x = p.x + place(p.x_stride, {tokens.row, tokens.start + t}, first);
        S *y = p.y + place(p.y_stride, {tokens.row, tokens.start + t}, first);
        if (lane == 0) {
            barriers_init(full);
            barrier_expect(barrier, rows * bytes);
        }
        __syncwarp();
        if (lane < rows) copy_in(shared_address(tile[lane]), x + times(lane, p.x_stride[2]), bytes, barrier);

        int channel = inside ? d : 0;
        const S *own = x + (channel - first);
        Vector window[KEPT];
        if (t) {
#pragma unroll
            for (int j = 0; j < HALO; j++) window[j].template load<VECTOR>(own - times(HALO - j, p.x_stride[2]));
        }
        Taps taps(p, channel);
        keep_unpacked(taps);
        States states = states_of(p, i, tokens.count);
        bool is_padding = states.read < 0;
        if (!t && inside) begin_sequence(p, i, states, d, own, tokens.count, window);
        Floats before[KEPT];
#pragma unroll
        for (int j = 0; j < HALO; j++) before[j] = floats(window[j]);
        // No thread waits at a barrier that does not exist yet.
        __syncthreads();
        barrier_wait(barrier, 0);
        // No token asks whether it is padding, so that the instructions of several tokens mix. Rows past the end are
        // computed from what lies there, and stay.
        if (inside && !is_padding) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                S *at = &tile[r][threadIdx.x * VECTOR];
                Vector token;
                token.template load<VECTOR>(at);
                Floats now = floats(token);
                Vector out = taps.step(p, d, before, now);
                push(before, now);
                out.template store<VECTOR>(at);
            }
        } else if (inside) {
            for (int r = 0; r < ROWS; r++) Vector{}.template store<VECTOR>(&tile[r][threadIdx.x * VECTOR]);
        }
        copy_out_fence();
        __syncthreads();
        if (lane < rows) {
#if OUTPUTS > 1
            for_each_part(p, first, first + columns, [&](const Output &output, i64 low, i64 high) {
                y = output.y + place(output.stride, {tokens.row, tokens.start + t + lane}, (int)low);
                copy_out(y, shared_address(&tile[lane][low - first]), (unsigned)((high - low) * sizeof(S)));
            });
#else
            copy_out(y + times(lane, p.y_stride[2]), shared_address(tile[lane]), bytes);
#endif
            copy_out_wait();
        }
    }
    if (!inside || !given(STARTS)) return;
    clear_tail(p, d, boundary(p, (int)p.sequences) + piece, gridDim.y);
    if (d == 0 && piece == 0) report_all_boundaries(p);
}
