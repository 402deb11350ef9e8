//! `windrow.conv3d`.

use crate::array::{Array, desc, view};
use crate::call::{
    ActivationName, PlanCache, filter_of, run, without_batch_invariant, word, word_or_default,
};
use crate::conv2d::{FilterCache, no_number};
use crate::error::IntoPy;
use crate::output::Output;
use pyo3::prelude::*;
use windrow::{
    Accuracy, Conv2dAlgorithm, Conv3dArgs, Conv3dOutputs, Conv3dParams, Conv3dPlan, Conv3dSpec,
    Filter, PlanOptions, TimePadding, Weights,
};

/// A spec, the algorithm where the caller names one, whether the packed filter is kept, the memory that a plan may take,
/// and whether the bits of a video must not depend on the batch.
type Key = (Conv3dSpec, Option<Conv2dAlgorithm>, Filter, Option<usize>, bool);
static PLANS: PlanCache<Key, Conv3dPlan> = PlanCache::new();

fn make_plan(key: &Key, options: &PlanOptions) -> windrow::Result<Conv3dPlan> {
    let (spec, algorithm, filter, memory, batch_invariant) = key;
    let options = options.with_filter(*filter).with_memory(*memory);
    let options = options.with_batch_invariant(*batch_invariant);
    match algorithm {
        None => Conv3dPlan::new(spec, &options),
        Some(algorithm) => Conv3dPlan::with_algorithm(spec, *algorithm, &options),
    }
}

/// A number for all directions, or one for each; `default` if there is none.
fn three(arg: &str, given: Option<&Bound<'_, PyAny>>, default: usize) -> PyResult<[usize; 3]> {
    let Some(given) = given else { return Ok([default; 3]) };
    let one = given.extract::<usize>().map(|n| [n; 3]);
    one.or_else(|_| given.extract::<[usize; 3]>())
        .map_err(|_| no_number(arg, given, "an int, or one for each direction", 3))
}

type Options<'a, 'py> =
    (Option<&'a Bound<'py, PyAny>>, Option<&'a Bound<'py, PyAny>>, Option<&'a Bound<'py, PyAny>>);

fn params(
    (stride, padding, dilation): Options<'_, '_>,
    groups: usize,
    activation: Option<ActivationName>,
    accuracy: Option<&str>,
) -> PyResult<Conv3dParams> {
    Ok(Conv3dParams::default()
        .with_stride(three("stride", stride, 1)?)
        .with_padding(three("padding", padding, 0)?)
        .with_dilation(three("dilation", dilation, 1)?)
        .with_groups(groups)
        .with_activation(ActivationName::or_none(activation))
        .with_accuracy(word_or_default::<Accuracy>(accuracy)?))
}

/// Three-dimensional convolution, by Winograd if filter and stride allow it and the error stays within `accuracy`
/// (default "fp32").
///
/// x: [n, c, t, h, w], f32, f16 or bf16, any strides; the result [n, k, ot, oh, ow] is channels-last if x
/// is. weight: [k, c / groups, kt, r, s] of x's type; bias: [k], f32 or x's type.
/// stride, padding, dilation: a number for all directions, or three numbers (frames, rows, columns).
/// time_padding: "zeros"; "causal", which reads the (kt - 1) * dilation frames before the first one, zeros without
/// initial_frames; or "causal_repeat", with the first frame in place of zeros.
/// initial_frames: the frames before the first one, [n, c, (kt - 1) * dilation, h, w]. final_frames: an array of this
/// shape, which the frames after the last one would follow; it is written, and may be initial_frames.
/// residual, activation, accuracy, algorithm, batch_invariant and out: as for `conv2d`.
///
/// Raises ValueError, TypeError (element types) or NotImplementedError (an algorithm that cannot
/// compute this case).
#[pyfunction]
#[pyo3(signature = (x, weight, bias=None, *, stride=None, padding=None, dilation=None, groups=1,
                    time_padding=None, initial_frames=None, final_frames=None, residual=None,
                    activation=None, accuracy=None, algorithm=None, batch_invariant=false, out=None,
                    filters=None, memory=None),
       text_signature = "(x, weight, bias=None, *, stride=1, padding=0, dilation=1, groups=1, \
                         time_padding='zeros', initial_frames=None, final_frames=None, \
                         residual=None, activation=None, accuracy=None, algorithm=None, \
                         batch_invariant=False, out=None)")]
#[expect(clippy::too_many_arguments, reason = "a Python signature")]
pub(crate) fn conv3d<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    stride: Option<&Bound<'py, PyAny>>,
    padding: Option<&Bound<'py, PyAny>>,
    dilation: Option<&Bound<'py, PyAny>>,
    groups: usize,
    time_padding: Option<&str>,
    initial_frames: Option<&Bound<'py, PyAny>>,
    final_frames: Option<&Bound<'py, PyAny>>,
    residual: Option<&Bound<'py, PyAny>>,
    activation: Option<ActivationName>,
    accuracy: Option<&str>,
    algorithm: Option<&str>,
    batch_invariant: bool,
    out: Option<&Bound<'py, PyAny>>,
    filters: Option<(PyRef<'py, FilterCache>, bool)>,
    memory: Option<usize>,
) -> PyResult<Bound<'py, PyAny>> {
    let (accuracy, is_said) = without_batch_invariant(accuracy);
    let params = params((stride, padding, dilation), groups, activation, accuracy)?
        .with_time_padding(word_or_default::<TimePadding>(time_padding)?);
    let algorithm = algorithm.map(word).transpose()?;
    let (x, weight) = (Array::import("x", x)?, Array::import("weight", weight)?);
    let bias = Array::import_option("bias", bias, None)?;
    let residual = Array::import_option("residual", residual, None)?;
    let initial = Array::import_option("initial_frames", initial_frames, None)?;
    let last = Array::import_option("final_frames", final_frames, None)?;
    let spec = Conv3dSpec::new(x.desc, weight.desc, &params).py()?;
    let mut spec = spec
        .with_bias(desc(&bias))
        .with_residual(residual.is_some())
        .with_initial_frames(desc(&initial))
        .with_final_frames(desc(&last));
    let mut y = Output::new(py, out, &x, || Ok(spec.y))?;
    spec.y = y.desc();
    let elements = [&spec.x, &spec.w, &spec.y].map(|t| t.layout.len()).into_iter().max();
    let filter = filter_of(filters.is_some());
    let key = (spec, algorithm, filter, memory, batch_invariant || is_said);
    let plan = PLANS.get(py, &key, x.device, make_plan)?;
    let w = match &filters {
        Some((cache, frozen)) => Weights::Cached(weight.view(), cache.frozen(*frozen)),
        None => Weights::Raw(weight.view()),
    };
    let added = residual.as_ref().map(|residual| residual.view_as(&key.0.y));
    let args = Conv3dArgs::new(x.view(), w).with_bias(view(&bias)).with_residual(added);
    let args = args.with_initial_frames(view(&initial));
    let last = last.as_ref().map(Array::view_changed).transpose()?;
    let outputs = Conv3dOutputs::new(y.view_mut()?).with_final_frames(last);
    let bytes = plan.workspace_bytes_for(&args);
    run(py, &x, bytes, elements.unwrap_or(0), |ws| plan.run(&args, outputs, ws))?;
    y.finish(py, &x.family)
}

/// The options of [`conv3d`] by name, in a dictionary.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Named<'py> {
    stride: Bound<'py, PyAny>,
    padding: Bound<'py, PyAny>,
    dilation: Bound<'py, PyAny>,
    groups: usize,
    activation: Option<ActivationName>,
    accuracy: Option<String>,
    memory: Option<usize>,
}

/// Memory that [`conv3d`] needs beside its tensors: for the packed filter, and for the rest.
#[pyfunction]
pub(crate) fn conv3d_bytes<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    named: Named<'py>,
    residual: bool,
    is_kept: bool,
) -> PyResult<(usize, usize)> {
    let (accuracy, batch_invariant) = without_batch_invariant(named.accuracy.as_deref());
    let options = (Some(&named.stride), Some(&named.padding), Some(&named.dilation));
    let params = params(options, named.groups, named.activation, accuracy)?;
    let (x, weight) = (Array::import("x", x)?, Array::import("weight", weight)?);
    let bias = Array::import_option("bias", bias, None)?;
    let spec = Conv3dSpec::new(x.desc, weight.desc, &params).py()?;
    let spec = spec.with_bias(desc(&bias)).with_residual(residual);
    let key = (spec, None, filter_of(is_kept), named.memory, batch_invariant);
    let plan = PLANS.get(py, &key, x.device, make_plan)?;
    let packed = windrow::FilterCache::default();
    let bytes = |w| plan.workspace_bytes_for(&Conv3dArgs::new(x.view(), w).with_bias(view(&bias)));
    let scratch = bytes(Weights::Cached(weight.view(), &packed));
    Ok((bytes(Weights::Raw(weight.view())) - scratch, scratch))
}
