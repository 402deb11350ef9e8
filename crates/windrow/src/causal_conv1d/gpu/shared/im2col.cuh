// Parameters of the convolution as a matrix product, C = A B^T:
//
// A   [batch * length, width * channels]   column k * channels + c is what tap k of channel c lies on
// B   [outputs, width * channels]          the weight; a depthwise one with zeros
// C   [batch * length, outputs], f32
//
// G   element type of A and B
#pragma once
#include "causal_conv1d.cuh"

struct GemmParams {
    Params base;
    G::Storage *a, *b;
    float *c;
    i64 outputs;
    // [outputs, channels, width]
    i64 weight_stride[3];
};
static_assert(GEMM_PARAMS_AGREE, "as the host's structure");
