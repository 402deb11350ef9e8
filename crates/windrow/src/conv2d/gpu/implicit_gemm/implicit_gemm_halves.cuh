// Outputs in f16 and bf16 of implicit_gemm_single.cu: where they lie, what is added, and how they are stored.

// A thread's pixels of a tile of 64: where their outputs lie.
struct Place {
#if OUT == CHANNEL_VECTORS
    static constexpr int COUNT = 2; // rows lane / 4 and 8 more of the product
#elif OUT == PIXEL_VECTORS
    static constexpr int COUNT = GATHER == MAP ? 2 : 1; // the first of four, or of two and of the two that are 8 further on
#else
    static constexpr int COUNT = 4;
#endif
    Element* y[COUNT]; // null where there is no pixel

    __device__ __forceinline__ Place(const Params& p, int row, int lane) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            constexpr int OF_TWO = OUT == PIXEL_VECTORS ? 1 : 2; // places of two neighbours
            const int pixel = OUT == CHANNEL_VECTORS ? pixel_of(row + lane / 4 + 8 * i)
                              : GATHER == MAP        ? row + lane % 4 * 2 + 8 * (i / OF_TWO) + i % OF_TWO
                                                     : row + lane % 4 * 4 + i;
            const bool exists = has_pixel(p, pixel);
            const Pixel at(p, exists ? pixel : 0);
            y[i] = exists ? p.y + (at.image * p.y_n + at.row * p.y_h + at.column * p.y_w) : nullptr;
        }
    }
};

// Transposes a block of 8 x 8 elements, of which a lane has two neighbours of row lane / 4.
__device__ __forceinline__ u32 turned(u32 v) {
    u32 w;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(w) : "r"(v));
    return w;
}

// What is added to the outputs that `store` stores together, as it lies in memory: two words for each group of columns.
struct Additions {
    u32 words[STORE_J][2] = {}; // else registers would be kept for what no load sets

    __device__ __forceinline__ void load(const Params& p, int j0, const Place& place, const Columns& columns, int lane) {
        if (!RESIDUAL) return;
        const int group = rank_in_cluster() * SHARE + j0;
#if OUT == CHANNEL_VECTORS
        const int k = columns.first + channel_of(lane % 4, group, 0);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            if (k >= columns.end || place.y[t] == nullptr) continue;
            Raw<T, 2 * STORE_J> all;
            all.template load<2 * STORE_J>(beside(p.residual, p.y, place.y[t]) + k);
#pragma unroll
            for (int j = 0; j < STORE_J; j++) words[j][t] = all.words[j];
        }
#else
#pragma unroll
        for (int j = 0; j < STORE_J; j++) {
            const int k = columns.first + channel_of(lane / 8, group + j, lane / 4 % 2);
            if (k >= columns.end) continue;
            const i64 channel = k * p.y_k;
#if OUT == PIXEL_VECTORS && GATHER == MAP
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (place.y[i] != nullptr)
                    words[j][i] = *reinterpret_cast<const u32*>(beside(p.residual, p.y, place.y[i]) + channel);
#elif OUT == PIXEL_VECTORS
            if (place.y[0] == nullptr) continue;
            const uint2 v = *reinterpret_cast<const uint2*>(beside(p.residual, p.y, place.y[0]) + channel);
            words[j][0] = v.x, words[j][1] = v.y;
#else
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (place.y[i] != nullptr)
                    words[j][i / 2] |= static_cast<u32>(beside(p.residual, p.y, place.y[i])[channel]) << (16 * (i % 2));
#endif
        }
#endif
    }

    // Of channels e = 0, 1 of column group j and row t of the product.
    __device__ __forceinline__ float2 at(int j, int t) const {
        const u32 word = OUT == CHANNEL_VECTORS ? words[j][t] : turned(words[j][t]);
        return make_float2(to_float(static_cast<Element>(word)), to_float(static_cast<Element>(word >> 16)));
    }
};

// Stores the sums of column groups j0 to j0 + STORE_J of a block's share of a tile, sum[4 j + 2 t + e] (hopper.cuh).
__device__ __forceinline__ void store(const Params& p, const float* sum, const Additions& added, int j0, const Place& place,
                                      const Columns& columns, int lane, const float* bias) {
    constexpr int J = STORE_J;
    const int group = rank_in_cluster() * SHARE + j0, first = channel_of(lane % 4, group, 0);
    u32 v[2][J];
#pragma unroll
    for (int j = 0; j < J; j++) {
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const float* const s = sum + 4 * j + 2 * t;
            float2 y = make_float2(s[0] + bias[first + 2 * j], s[1] + bias[first + 2 * j + 1]);
            if (RESIDUAL) {
                const float2 more = added.at(j, t);
                y = make_float2(y.x + more.x, y.y + more.y);
            }
            v[t][j] = T::pack(epilogue(y.x), epilogue(y.y));
        }
    }
#if OUT == CHANNEL_VECTORS
    const int k = columns.first + first;
#pragma unroll
    for (int t = 0; t < 2; t++) {
        if (k >= columns.end || place.y[t] == nullptr) continue;
        Raw<T, 2 * J> all;
#pragma unroll
        for (int j = 0; j < J; j++) all.words[j] = v[t][j];
        all.template store<2 * J>(place.y[t] + k);
    }
#else
#pragma unroll
    for (int j = 0; j < J; j++) {
        const u32 words[2] = {turned(v[0][j]), turned(v[1][j])};
        const int k = columns.first + channel_of(lane / 8, group + j, lane / 4 % 2);
        if (k >= columns.end) continue;
        const i64 channel = k * p.y_k;
#if OUT == PIXEL_VECTORS && GATHER == MAP
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (place.y[i] != nullptr) *reinterpret_cast<u32*>(place.y[i] + channel) = words[i];
#elif OUT == PIXEL_VECTORS
        if (place.y[0] != nullptr) *reinterpret_cast<uint2*>(place.y[0] + channel) = make_uint2(words[0], words[1]);
#else
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (place.y[i] != nullptr) place.y[i][channel] = static_cast<Element>(words[i / 2] >> (16 * (i % 2)));
#endif
    }
#endif
}

