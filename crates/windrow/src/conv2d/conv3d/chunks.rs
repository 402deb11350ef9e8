//! The cases of videos in chunks for `windrow verify`: a chunk that begins with the state of the one before has the bits of
//! the whole video, by an algorithm that does not choose by the number of frames.

use super::{Conv3dArgs, Conv3dOutputs, Conv3dPlan, Conv3dSpec};
use crate::conv2d::{Conv2dAlgorithm, Conv3dParams, TimePadding};
use crate::verification::data::Held;
use crate::verification::{Case, Check, Expected, random};
use crate::{DType, Device, Layout, PlanOptions, Result, TensorDesc, TensorRef, Workspace};
use std::ops::Range;

/// n, c, t, h, w, k, kt
const SIZES: [usize; 7] = [2, 20, 14, 7, 9, 24, 3];
const CHUNKS: [usize; 5] = [1, 2, 3, 4, 7];

/// A convolution in chunks.
#[derive(Clone, Copy, Debug)]
struct Video {
    channels_last: bool,
    dtype: DType,
    stride: usize,
    dilation: usize,
    time_padding: TimePadding,
}

impl Video {
    const fn new(channels_last: bool, dtype: DType, steps: [usize; 2]) -> Self {
        let [stride, dilation] = steps;
        Video { channels_last, dtype, stride, dilation, time_padding: TimePadding::Causal }
    }

    const fn repeated(self) -> Self {
        Video { time_padding: TimePadding::CausalRepeat, ..self }
    }
}

const VIDEOS: [Video; 5] = [
    Video::new(false, DType::F32, [1, 1]),
    Video::new(true, DType::F32, [1, 1]).repeated(),
    Video::new(false, DType::BF16, [1, 2]),
    Video::new(true, DType::F16, [2, 1]),
    Video::new(false, DType::F32, [2, 2]).repeated(),
];

/// The cases: every algorithm, with layouts, types, strides and dilations.
pub(super) fn cases(device: Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for video in VIDEOS {
        let Video { dtype, stride, dilation, time_padding, .. } = video;
        let layout = if video.channels_last { "channels_last" } else { "contiguous" };
        let Ok(spec) = video.spec(SIZES[2]) else { continue };
        let chooses = |algorithm: &Conv2dAlgorithm| {
            device != Device::Cpu && *algorithm == Conv2dAlgorithm::ImplicitGemm
        };
        let mut algorithms = Conv3dPlan::algorithms(&spec, device);
        algorithms.retain(|algorithm| !chooses(algorithm));
        cases.extend(algorithms.into_iter().map(|algorithm| Case {
            op: "conv3d",
            algorithm: algorithm.name().into(),
            dtype,
            layout: layout.into(),
            name: format!("chunks, stride {stride}, dilation {dilation}, {time_padding}"),
            elements: spec.x.layout.len(),
            run: Box::new(move || video.run(algorithm, device)),
        }));
    }
    cases
}

/// Some frames of a tensor [n, channels, frames, ..] in row-major order.
fn narrowed(values: &[f64], [count, frames]: [usize; 2], range: Range<usize>) -> Vec<f64> {
    let pixels = values.len() / (count * frames).max(1);
    let of = |channel: usize| {
        let start = channel * frames * pixels;
        &values[start + range.start * pixels..start + range.end * pixels]
    };
    (0..count).flat_map(|channel| of(channel).iter().copied()).collect()
}

impl Video {
    fn desc(&self, shape: &[usize]) -> Result<TensorDesc> {
        let order = if self.channels_last { [0, 2, 3, 4, 1] } else { [0, 1, 2, 3, 4] };
        Ok(TensorDesc { dtype: self.dtype, layout: Layout::with_order(shape, &order)? })
    }

    /// The spec of so many frames, without states.
    fn spec(&self, frames: usize) -> Result<Conv3dSpec> {
        let [n, c, _, h, w, k, kt] = SIZES;
        let params = Conv3dParams::default()
            .with_padding([0, 1, 1])
            .with_stride([self.stride, 1, 1])
            .with_dilation([self.dilation, 1, 1])
            .with_time_padding(self.time_padding);
        let filter = self.desc(&[k, c, kt, 3, 3])?;
        Conv3dSpec::new(self.desc(&[n, c, frames, h, w])?, filter, &params)
    }

    fn run(&self, algorithm: Conv2dAlgorithm, device: Device) -> Result<Vec<Check>> {
        let [n, c, t, h, w, k, kt] = SIZES;
        let options = PlanOptions::default().with_device(device);
        let hold = |desc: TensorDesc, values: &[f64]| Held::at(desc, values, 0, device);
        let whole = self.spec(t)?;
        let values = random(1, whole.x.layout.len(), -1.0, 1.0);
        let filter = hold(whole.w, &random(2, whole.w.layout.len(), -0.5, 0.5))?;
        // The run of a chunk, or of all frames. The state moves on in place.
        let run = |spec: &Conv3dSpec, x: &Held, state: Option<&Held>| -> Result<Held> {
            let plan = Conv3dPlan::with_algorithm(spec, algorithm, &options)?;
            let mut workspace = Workspace::new(device, plan.workspace_bytes())?;
            let mut y = hold(spec.y, &[])?;
            let initial = state.filter(|_| spec.initial_frames.is_some()).map(Held::as_ref);
            let args = Conv3dArgs::new(x.as_ref(), filter.as_ref()).with_initial_frames(initial);
            let last = state.map(|state| {
                let (at, desc) = (state.as_ref().as_ptr().cast_mut(), *state.as_ref().desc());
                // SAFETY: the tensor's elements, which nobody else writes; the initial frames may be the same memory.
                unsafe { crate::TensorMut::from_raw(at.cast(), desc, device) }
            });
            let outputs = Conv3dOutputs::new(y.as_mut()?).with_final_frames(last.transpose()?);
            plan.run(&args, outputs, &mut workspace)?;
            workspace.synchronize()?;
            Ok(y)
        };
        let x = hold(whole.x, &values)?;
        let want = run(&whole, &x, None)?.values()?;
        let ot = whole.y.shape()[2];
        let state = self.desc(&[n, c, (kt - 1) * self.dilation, h, w])?;
        let mut checks = Vec::new();
        for chunk in CHUNKS.into_iter().filter(|chunk| chunk.is_multiple_of(self.stride)) {
            let held = hold(state, &vec![0.0; state.layout.len()])?;
            for first in (0..t).step_by(chunk) {
                let frames = first..(first + chunk).min(t);
                let mut spec = self.spec(frames.len())?;
                spec.initial_frames = (first > 0).then_some(state);
                spec.final_frames = Some(state);
                let x = hold(spec.x, &narrowed(&values, [n * c, t], frames.clone()))?;
                let y = run(&spec, &x, Some(&held))?;
                let frames = frames.start / self.stride..frames.end.div_ceil(self.stride);
                let want = Expected::exactly(narrowed(&want, [n * k, ot], frames))?;
                let got: TensorRef<'_> = y.as_ref();
                checks.push(want.check("y of a chunk", &got, 0.0)?);
            }
        }
        Ok(checks)
    }
}
