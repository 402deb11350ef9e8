//! Layers of shapes around the borders of kernels.

use super::*;

/// A layer of x, k and r = s with stride and padding, in all combinations of dense layouts and in gaps, and its gradients.
fn layer(x: [usize; 4], [k, r]: [usize; 2], [stride, padding]: [usize; 2], groups: usize) {
    let dense = [Arrangement::Nchw, Arrangement::ChannelsLast];
    let mixed = dense.map(|x| dense.map(|y| [x, Arrangement::Nchw, y]));
    let mut forms = mixed.concat();
    forms.extend([
        [Arrangement::Gaps; 3],
        [Arrangement::Reversed, Arrangement::ChannelsLast, Arrangement::Gaps],
    ]);
    for (i, forms) in forms.into_iter().enumerate() {
        let activation = [Activation::Relu, Activation::Silu][i % 2];
        let params = Conv2dParams {
            stride: [stride; 2],
            padding: [padding; 2],
            groups,
            activation,
            ..Default::default()
        };
        let bias = [Some(DType::F32), None][i / 2 % 2];
        let case = Case { x, filter: [k, r, r], params, dtype: DType::F32, bias, forms };
        case.check();
        case.check_backward();
    }
}

/// AMX multiplies pixels in place if strides allow: images that follow each other, more pixels and channels than a
/// block has, single pixels and rows.
#[test]
fn filters_of_one_tap() {
    layer([3, 40, 7, 7], [33, 1], [1, 0], 1);
    layer([2, 200, 9, 16], [40, 1], [1, 0], 1);
    // A page from pixel to pixel.
    layer([1, 1024, 5, 4], [40, 1], [1, 0], 1);
    layer([2, 17, 9, 16], [20, 1], [2, 0], 1);
    layer([1, 5, 12, 13], [50, 1], [3, 1], 1);
    layer([1, 300, 1, 1], [7, 1], [1, 0], 1);
    layer([2, 18, 1, 30], [24, 1], [1, 0], 2);
    layer([0, 3, 4, 4], [2, 1], [1, 0], 1);
}

/// Widths around a vector's and around those that are summed at once, more rows than a block has.
#[test]
fn depthwise_images() {
    for width in [1, 3, 7, 8, 9, 15, 16, 17, 30] {
        layer([2, 9, width, width], [9, 3], [1, 1], 9);
        layer([1, 20, 8, width], [20, 3], [2, 1], 20);
    }
    layer([1, 8, 14, 14], [8, 5], [2, 2], 8);
    layer([1, 3, 150, 70], [3, 7], [1, 3], 3);
}

/// Distances of pixels that are constants and others, widths around those that are summed at once, channels that leave a
/// panel unfilled, rows in several pieces, more rows than a block has.
#[test]
fn few_channels() {
    for width in [1, 3, 5, 7, 14, 15, 29] {
        layer([2, 3, 9, width], [40, 3], [1, 1], 1);
    }
    layer([1, 3, 40, 31], [64, 7], [2, 3], 1);
    layer([1, 4, 16, 36], [96, 4], [4, 0], 1);
    layer([1, 6, 5, 3000], [33, 3], [1, 1], 1);
    layer([2, 1, 9, 40], [32, 5], [1, 2], 1);
}

/// Whole vectors of a group's channels and half ones, widths around those that are summed at once, neighbouring columns at
/// the steps that are constants and others.
#[test]
fn groups_of_half_vectors() {
    let dtypes = [DType::F32, DType::F16, DType::F32, DType::BF16];
    let mut checked = 0;
    for [c, k] in [[24, 24], [40, 40], [8, 8], [56, 56], [3, 24]] {
        for (w, width) in [1, 3, 7, 9, 29].into_iter().enumerate() {
            for (i, [stride, padding, dilation]) in
                [[1, 1, 1], [2, 1, 1], [2, 0, 1], [1, 1, 2], [2, 2, 2]].into_iter().enumerate()
            {
                let params = Conv2dParams {
                    stride: [stride; 2],
                    padding: [padding; 2],
                    dilation: [dilation; 2],
                    groups: 3,
                    activation: [Activation::Relu, Activation::Silu][(w + i) % 2],
                    ..Default::default()
                };
                let last = [Arrangement::ChannelsLast, Arrangement::Reversed][i % 2];
                let case = Case {
                    x: [1 + i % 2, 3 * c, 3 + (w + i) % 3, width],
                    filter: [3 * k, 3, 3],
                    params,
                    dtype: dtypes[(checked + w) % 4],
                    bias: [Some(DType::F32), None][(w + i) % 3 % 2],
                    forms: [last, Arrangement::Nchw, last],
                };
                let Ok(spec) = case.spec() else { continue };
                case.check_algorithms(&spec, &[Conv2dAlgorithm::DirectGrouped]);
                checked += 1;
            }
        }
    }
    assert!(checked > 80, "{checked}");
}

/// Channels that are multiplied by one number each, for numbers of them around a vector's, also with steps and padding.
#[test]
fn scaled_channels() {
    let activations = [Activation::Relu, Activation::Identity, Activation::Silu];
    for (i, c) in [3, 8, 16, 24, 40, 133].into_iter().enumerate() {
        for (j, [stride, padding]) in [[1, 0], [2, 0], [1, 1]].into_iter().enumerate() {
            for (t, dtype) in [DType::F32, DType::F16, DType::BF16].into_iter().enumerate() {
                let case = Case {
                    x: [1 + i % 2, c, 2 + t, [1, 5, 9][(i + t) % 3]],
                    filter: [c, 1, 1],
                    params: Conv2dParams {
                        stride: [stride; 2],
                        padding: [padding; 2],
                        groups: c,
                        activation: activations[(i + j + t) % 3],
                        ..Default::default()
                    },
                    dtype,
                    bias: [Some(DType::F32), None][(i + j) % 2],
                    forms: [
                        Arrangement::ChannelsLast,
                        Arrangement::Nchw,
                        Arrangement::ChannelsLast,
                    ],
                };
                let spec = case.spec().unwrap();
                case.check_algorithms(&spec, &[Conv2dAlgorithm::DirectGrouped]);
            }
        }
    }
}

/// Filters that are read where they lie, for numbers of channels and terms around those that are summed at once.
#[test]
fn one_pixel() {
    for (i, c) in [1, 7, 16, 33, 100, 336, 2053].into_iter().enumerate() {
        for (j, k) in [1, 3, 16, 18, 85].into_iter().enumerate() {
            let case = Case {
                x: [1, c, 1 + i % 2, 1],
                filter: [k, 1, 1],
                params: Conv2dParams {
                    stride: [2, 2],
                    activation: [Activation::Relu, Activation::Silu, Activation::Identity][j % 3],
                    ..Default::default()
                },
                dtype: DType::F32,
                bias: [Some(DType::F32), None][(i + j) % 2],
                forms: [Arrangement::ChannelsLast, Arrangement::Nchw, Arrangement::ChannelsLast],
            };
            let spec = case.spec().unwrap();
            case.check_algorithms(&spec, &[Conv2dAlgorithm::Im2colGemm]);
        }
    }
}
