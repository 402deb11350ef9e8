//! `Conv`.

use crate::operator::{Kernel, Outcome};
use crate::plans::Plans;
use crate::tensors::{Attributes, Tensors, invalid, seen_as, unsupported};
use std::ffi::CStr;
use windrow::{
    Activation, Conv2dArgs, Conv2dParams, Conv2dPlan, Conv2dSpec, Device, FilterCache, Tensor,
    TensorDesc, TensorRef, Weights, Workspace,
};

/// The operator `Conv` as in ONNX since opset 1, for images [n, c, h, w] and rows [n, c, l], with an `activation` after
/// the bias.
pub(crate) struct Conv {
    auto_pad: AutoPad,
    pads: Option<Vec<i64>>,
    strides: Option<Vec<i64>>,
    dilations: Option<Vec<i64>>,
    kernel_shape: Option<Vec<i64>>,
    group: i64,
    activation: Activation,
    filters: FilterCache,
    plans: Plans<Conv2dSpec, Conv2dPlan>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AutoPad {
    NotSet,
    SameUpper,
    SameLower,
    Valid,
}

impl Kernel for Conv {
    const NAME: &'static CStr = c"Conv";
    const INPUTS: &'static [bool] = &[true, true, false];
    const OUTPUTS: usize = 1;

    fn new(attributes: &Attributes<'_>) -> Outcome<Self> {
        let auto_pad = match attributes.string(c"auto_pad")?.as_deref() {
            None | Some("NOTSET" | "") => AutoPad::NotSet,
            Some("SAME_UPPER") => AutoPad::SameUpper,
            Some("SAME_LOWER") => AutoPad::SameLower,
            Some("VALID") => AutoPad::Valid,
            Some(other) => return Err(invalid(format!("`auto_pad` is {other}"))),
        };
        let filters = FilterCache::new();
        filters.set_frozen(attributes.is_constant(1)?);
        Ok(Conv {
            auto_pad,
            pads: attributes.ints(c"pads")?,
            strides: attributes.ints(c"strides")?,
            dilations: attributes.ints(c"dilations")?,
            kernel_shape: attributes.ints(c"kernel_shape")?,
            group: attributes.int(c"group", 1)?,
            activation: attributes.word(c"activation")?,
            filters,
            plans: Plans::new(),
        })
    }

    fn compute(&self, tensors: &Tensors<'_>) -> Outcome<()> {
        let (x, w, bias) = (tensors.input(0)?, tensors.input(1)?, tensors.optional_input(2)?);
        let is_row = x.shape().len() == 3;
        let (x, w) = (image("X", x)?, image("W", w)?);
        let geometry = self.geometry(is_row, x.shape(), w.shape())?;
        let padded = geometry.padded(&x)?;
        let x = padded.as_ref().map_or(x, Tensor::as_ref);
        let params = Conv2dParams::default()
            .with_stride(geometry.stride)
            .with_padding(geometry.padding())
            .with_dilation(geometry.dilation)
            .with_groups(size("group", self.group)?)
            .with_activation(self.activation);
        let spec = Conv2dSpec::new(*x.desc(), *w.desc(), &params)?;
        let y_desc = TensorDesc::contiguous(x.dtype(), &geometry.result(&spec))?;
        let &[n, k, h, l] = y_desc.shape() else { unreachable!("an image") };
        let shape = if is_row { &[n, k, l][..] } else { &[n, k, h, l] };
        let y = tensors.output(0, shape, y_desc)?;
        if geometry.is_empty.contains(&true) {
            return Ok(());
        }
        let spec = spec.with_output(y_desc).with_bias(bias.map(|b| *b.desc()));
        let plan = self.plans.get(spec, Conv2dPlan::new)?;
        let weights = Weights::Cached(w, &self.filters);
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes_for(&x, &weights))?;
        Ok(plan.run(&Conv2dArgs::new(x, weights).with_bias(bias), y, &mut workspace)?)
    }
}

/// The tensor as an image, of one row if it is a row.
fn image<'a>(arg: &str, x: TensorRef<'a>) -> Outcome<TensorRef<'a>> {
    match *x.shape() {
        [_, _, _, _] => Ok(x),
        [n, c, l] => seen_as(x, &[n, c, 1, l]),
        _ => Err(unsupported(format!("`{arg}` of shape {:?}: images and rows only", x.shape()))),
    }
}

/// Over rows and columns.
struct Geometry {
    stride: [usize; 2],
    dilation: [usize; 2],
    /// Zeros before the first, and behind the last.
    pads: [[usize; 2]; 2],
    /// True for a direction in which the result must stay empty, whatever zeros are added.
    is_empty: [bool; 2],
}

impl Conv {
    fn geometry(&self, is_row: bool, x: &[usize], w: &[usize]) -> Outcome<Geometry> {
        let pair = |name: &str, list: &Option<Vec<i64>>, default| match list.as_deref() {
            None => Ok([default; 2]),
            Some(&[a]) if is_row => Ok([default, size(name, a)?]),
            Some(&[a, b]) if !is_row => Ok([size(name, a)?, size(name, b)?]),
            Some(other) => Err(invalid(format!("`{name}` is {other:?}"))),
        };
        let stride = pair("strides", &self.strides, 1)?;
        let dilation = pair("dilations", &self.dilations, 1)?;
        let taps = [w[2], w[3]];
        if let Some(given) = &self.kernel_shape
            && pair("kernel_shape", &self.kernel_shape, 1)? != taps
        {
            let taps = if is_row { &taps[1..] } else { &taps };
            return Err(invalid(format!("`kernel_shape` is {given:?}, and W has {taps:?}")));
        }
        let given = match self.pads.as_deref() {
            None => [[0; 2]; 2],
            Some(&[a, b]) if is_row => [[0; 2], [size("pads", a)?, size("pads", b)?]],
            Some(&[a, b, c, d]) if !is_row => {
                [[size("pads", a)?, size("pads", c)?], [size("pads", b)?, size("pads", d)?]]
            }
            Some(other) => return Err(invalid(format!("`pads` is {other:?}"))),
        };
        let same = |i: usize| same(x[2 + i], taps[i], stride[i], dilation[i]);
        let pads = match self.auto_pad {
            AutoPad::NotSet => given,
            AutoPad::Valid => [[0; 2]; 2],
            AutoPad::SameUpper => [same(0), same(1)],
            AutoPad::SameLower => [same(0), same(1)].map(|[less, more]| [more, less]),
        };
        let is_same = matches!(self.auto_pad, AutoPad::SameUpper | AutoPad::SameLower);
        let is_empty = [x[2], x[3]].map(|positions| is_same && positions == 0);
        Ok(Geometry { stride, dilation, pads, is_empty })
    }
}

/// Zeros, fewer before than behind by at most one, for a result of `x / stride` elements, rounded up.
fn same(x: usize, taps: usize, stride: usize, dilation: usize) -> [usize; 2] {
    let steps = x.div_ceil(stride.max(1)).saturating_sub(1).saturating_mul(stride);
    let reach = taps.saturating_sub(1).saturating_mul(dilation).saturating_add(1);
    let total = steps.saturating_add(reach).saturating_sub(x);
    [total / 2, total - total / 2]
}

impl Geometry {
    /// The shape of the result: as many positions as the strides have in the input's, where that is asked for.
    fn result(&self, spec: &Conv2dSpec) -> [usize; 4] {
        let &[n, k, h, w] = spec.y.shape() else { unreachable!("an image") };
        let [no_rows, no_columns] = self.is_empty;
        [n, k, if no_rows { 0 } else { h }, if no_columns { 0 } else { w }]
    }

    fn is_symmetric(&self) -> bool {
        self.pads.iter().all(|[before, behind]| before == behind)
    }

    /// The padding that remains after [`Geometry::padded`].
    fn padding(&self) -> [usize; 2] {
        if self.is_symmetric() { self.pads.map(|[before, _]| before) } else { [0; 2] }
    }

    /// A copy with its zeros, where there are more on one side than on the other: plans know no such padding.
    fn padded(&self, x: &TensorRef<'_>) -> Outcome<Option<Tensor>> {
        if self.is_symmetric() {
            return Ok(None);
        }
        let &[n, c, h, w] = x.shape() else { unreachable!("an image") };
        let [[top, bottom], [left, right]] = self.pads;
        let sum = |a: usize, b: usize, c: usize| a.checked_add(b).and_then(|ab| ab.checked_add(c));
        let (Some(height), Some(width)) = (sum(h, top, bottom), sum(w, left, right)) else {
            return Err(invalid(format!("`pads` is {:?}", self.pads)));
        };
        let mut padded = Tensor::zeros(x.dtype(), &[n, c, height, width])?;
        let bytes = x.dtype().size();
        let (row, step) = (w * bytes, width * bytes);
        if n * c * h * row > 0 {
            // SAFETY: x is dense.
            let source = unsafe { std::slice::from_raw_parts(x.as_ptr(), n * c * h * row) };
            let planes = padded.as_bytes_mut().chunks_exact_mut(height * step);
            for (plane, from) in planes.zip(source.chunks_exact(h * row)) {
                for (to, from) in plane.chunks_exact_mut(step).skip(top).zip(from.chunks_exact(row))
                {
                    to[left * bytes..][..row].copy_from_slice(from);
                }
            }
        }
        Ok(Some(padded))
    }
}

fn size(name: &str, value: i64) -> Outcome<usize> {
    usize::try_from(value).map_err(|_| invalid(format!("`{name}` is {value}")))
}
