//! Convolutions that follow each other, and what stands between them, in one call.

use crate::array::{Array, lie_alike};
use crate::call::run;
use crate::conv2d_call::Conv2dCall;
use crate::error::{IntoPy, NotInPlace};
use crate::image_step::ImageStep;
use crate::output::Output;
use crate::seen::Seen;
use crate::torch::nothing_to_dispatch;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;
use windrow::cpu::with_team;
use windrow::internal::{Conv2dChain, Conv2dLink, prefetch};
use windrow::{Conv2dArgs, Device, Placed, TensorDesc, TensorRef, Weights, Workspace};

/// The number of elements of the largest step from which the threads are started for the whole call. Of smaller images
/// most convolutions run on the caller's thread alone.
const TEAM_FROM: usize = 64 << 10;

/// Calls on the CPU of which each reads images, or results of calls before it. With other images than those that the calls
/// were made for, after filters have got other memory, or if PyTorch's dispatcher has something to do for these tensors,
/// nothing is done and None returned.
///
/// Images and results are values, numbered in this order.
#[pyclass(module = "windrow._native", frozen)]
pub(crate) struct Conv2dSequence {
    images: usize,
    steps: Vec<Step>,
    /// Those of the convolutions.
    filters: Vec<(Seen, Option<Seen>)>,
    /// Cache lines that comparisons of the filters read.
    lines: Vec<usize>,
    results: Vec<usize>,
    bytes: usize,
    elements: usize,
}

struct Step {
    call: Call,
    image: usize,
    second: Option<usize>,
    /// The result is written over the image.
    in_place: bool,
    /// Values that nobody reads after it.
    last_read: Vec<usize>,
    /// This step and some after it, if they are computed together, and their number.
    chain: Option<(Conv2dChain, usize)>,
}

#[derive(FromPyObject)]
enum Call {
    Convolution(Py<Conv2dCall>),
    Image(Py<ImageStep>),
}

impl Call {
    fn x(&self) -> &TensorDesc {
        match self {
            Call::Convolution(call) => &call.get().plan().spec().x,
            Call::Image(call) => call.get().x(),
        }
    }

    /// A convolution's residual, or a gate.
    fn second(&self) -> Option<&TensorDesc> {
        match self {
            Call::Convolution(call) => {
                let spec = call.get().plan().spec();
                spec.residual.then_some(&spec.y)
            }
            Call::Image(call) => call.get().second(),
        }
    }

    fn y(&self) -> &TensorDesc {
        match self {
            Call::Convolution(call) => &call.get().plan().spec().y,
            Call::Image(call) => call.get().step().y(),
        }
    }

    fn convolution(&self) -> Option<&Conv2dCall> {
        match self {
            Call::Convolution(call) => Some(call.get()),
            Call::Image(_) => None,
        }
    }

    /// The number of elements that tells whether the interpreter lock is released.
    fn elements(&self) -> usize {
        match self {
            Call::Convolution(call) => call.get().elements(),
            Call::Image(call) => call.get().elements(),
        }
    }
}

type Filter<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

#[pymethods]
impl Conv2dSequence {
    /// Steps are calls, with the values that each reads: the image, and what a convolution adds or a gate. `filters` are
    /// those of the convolutions.
    #[new]
    fn new(
        py: Python<'_>,
        images: usize,
        steps: Vec<(Call, usize, Option<usize>)>,
        results: Vec<usize>,
        filters: Vec<Filter<'_>>,
    ) -> PyResult<Self> {
        let values = images + steps.len();
        let mut last = vec![None; values];
        for (i, (call, image, second)) in steps.iter().enumerate() {
            let fits = |value: usize, desc: &TensorDesc| match value.checked_sub(images) {
                None => true,
                Some(step) => step < i && lie_alike(steps[step].0.y(), desc),
            };
            let seconds_fit = match (*second, call.second()) {
                (Some(value), Some(desc)) => fits(value, desc),
                (second, desc) => second.is_none() && desc.is_none(),
            };
            let is_elsewhere = call.convolution().is_some_and(|c| c.device() != Device::Cpu);
            if is_elsewhere || !fits(*image, call.x()) || !seconds_fit {
                let message = format!("step {i} does not fit those before it");
                return Err(PyValueError::new_err(message));
            }
            for value in second.iter().chain([image]) {
                last[*value] = Some(i);
            }
        }
        let is_wrong = |(i, value): (usize, &usize)| {
            !(images..values).contains(value) || results[..i].contains(value)
        };
        if steps.is_empty() || results.iter().enumerate().any(is_wrong) {
            return Err(PyValueError::new_err("results are no different ones of steps"));
        }
        results.iter().for_each(|&value| last[value] = None);
        let convolutions = || steps.iter().filter_map(|(call, ..)| call.convolution());
        let bytes = convolutions().map(Conv2dCall::bytes).max().unwrap_or(0);
        let filters = filters.iter().map(|(weight, bias)| {
            let bias = bias.as_ref().map(|bias| Seen::of("bias", bias)).transpose()?;
            PyResult::Ok((Seen::of("weight", weight)?, bias))
        });
        let filters = filters.collect::<PyResult<Vec<_>>>()?;
        let fit = convolutions().zip(&filters).all(|(call, (weight, bias))| {
            let (spec, bias) = (call.plan().spec(), bias.as_ref().map(Seen::on_cpu));
            weight.on_cpu() == Some(&spec.w) && bias == spec.bias.as_ref().map(Some)
        });
        if convolutions().count() != filters.len() || !fit {
            return Err(PyValueError::new_err("filters do not fit the convolutions"));
        }
        let mut lines = Vec::new();
        for (weight, bias) in &filters {
            bias.iter().chain([weight]).try_for_each(|tensor| tensor.add_lines(py, &mut lines))?;
        }
        let elements = steps.iter().map(|(call, ..)| call.elements()).max().unwrap_or(0);
        let may_be_in_place: Vec<_> = steps
            .iter()
            .map(|(call, image, second)| match (call, image.checked_sub(images)) {
                (Call::Image(call), Some(step)) => {
                    *second != Some(*image) && call.get().may_replace(steps[step].0.y())
                }
                _ => false,
            })
            .collect();
        let steps = steps.into_iter().enumerate().map(|(i, (call, image, second))| {
            let last_read: Vec<_> =
                (images..values).filter(|&value| last[value] == Some(i)).collect();
            let in_place = may_be_in_place[i] && last_read.contains(&image);
            Step { call, image, second, in_place, last_read, chain: None }
        });
        let mut steps: Vec<Step> = steps.collect();
        let bytes = bytes.max(chain(images, &mut steps)?);
        Ok(Conv2dSequence { images, steps, filters, lines, results, bytes, elements })
    }

    fn __call__<'py>(
        &self,
        py: Python<'py>,
        images: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
        prefetch(&self.lines);
        let filters = self.filters.iter().flat_map(|(weight, bias)| bias.iter().chain([weight]));
        let tensors = images.iter().chain(filters.clone().map(|tensor| tensor.bind(py)));
        if images.len() != self.images || !nothing_to_dispatch(py, true, tensors)? {
            return Ok(None);
        }
        let imported = || {
            for tensor in filters {
                if !tensor.is_same(py)? {
                    return Ok(None);
                }
            }
            let images = images.iter().map(|image| Array::import("x", image));
            images.collect::<PyResult<Vec<_>>>().map(Some)
        };
        let images = match imported() {
            Err(e) if e.is_instance_of::<NotInPlace>(py) => return Ok(None),
            arrays => arrays?,
        };
        let Some(images) = images else { return Ok(None) };
        let is_image = |value: usize, planned: &TensorDesc| match images.get(value) {
            None => true,
            Some(image) => image.device == Device::Cpu && image.lies_as(planned),
        };
        let reads = |step: &Step| {
            let second = step.second.zip(step.call.second());
            is_image(step.image, step.call.x()) && second.is_none_or(|(v, desc)| is_image(v, desc))
        };
        if !self.steps.iter().all(reads) {
            return Ok(None);
        }
        let mut given_filters = Vec::with_capacity(self.filters.len());
        let convolutions = self.steps.iter().filter_map(|step| step.call.convolution());
        for (call, (weight, bias)) in convolutions.zip(&self.filters) {
            let weights = weight.view().and_then(|weight| call.weights(py, weight));
            let Some(weights) = weights else { return Ok(None) };
            given_filters.push((weights, bias.as_ref().and_then(Seen::view)));
        }
        let given: Vec<_> = images.iter().map(Array::view).collect();
        let computed = run(py, &images[0], self.bytes, self.elements, |workspace| {
            let compute = || self.compute(&given, given_filters, workspace);
            if self.elements < TEAM_FROM { compute() } else { with_team(compute) }
        });
        let mut computed = computed?;
        let finished = self.results.iter().map(|&value| {
            let result = computed[value - self.images].take();
            Output::Own(result.expect("each result is named once")).finish(py, &images[0].family)
        });
        finished.collect::<PyResult<_>>().map(Some)
    }
}

/// Makes chains of steps where that pays. Gives the bytes of their workspace.
fn chain(images: usize, steps: &mut [Step]) -> PyResult<usize> {
    let (mut first, mut bytes) = (0, 0);
    while first < steps.len() {
        let mut count = chained(images, steps, first);
        while count > 1 {
            let plans = steps[first..first + count].iter().filter_map(|s| s.call.convolution());
            let plans: Vec<_> = plans.map(|call| Arc::clone(call.plan())).collect();
            if let Some(chain) = Conv2dChain::new(&plans).py()? {
                bytes = bytes.max(chain.workspace_bytes());
                steps[first].chain = Some((chain, count));
                break;
            }
            count -= 1;
        }
        first += count;
    }
    Ok(bytes)
}

/// The number of steps, from the step `first` on, that may be a chain: each reads the result of the one before, which
/// nobody else reads.
fn chained(images: usize, steps: &[Step], first: usize) -> usize {
    let follows = |&i: &usize| {
        let (value, before, step) = (images + i - 1, &steps[i - 1].call, &steps[i]);
        step.image == value
            && step.second != Some(value)
            && step.last_read.contains(&value)
            && before
                .convolution()
                .zip(step.call.convolution())
                .is_some_and(|(a, b)| Conv2dChain::pays(a.plan(), b.plan()))
    };
    let others = (first + 1..steps.len()).take_while(follows).count();
    (1 + others).min(Conv2dChain::MOST)
}

impl Conv2dSequence {
    /// The results that are read, and nothing for the others. `filters` are those of the convolutions.
    fn compute(
        &self,
        given: &[TensorRef<'_>],
        filters: Vec<(Weights<'_>, Option<TensorRef<'_>>)>,
        workspace: &mut Workspace,
    ) -> windrow::Result<Vec<Option<Placed>>> {
        let mut computed: Vec<Option<Placed>> = Vec::with_capacity(self.steps.len());
        let mut filters = filters.into_iter();
        let mut at = 0;
        while at < self.steps.len() {
            let step = &self.steps[at];
            let count = step.chain.as_ref().map_or(1, |&(_, count)| count);
            let together = &self.steps[at..at + count];
            at += count;
            let y = match step.in_place {
                true => computed[step.image - given.len()].take(),
                false => None,
            };
            let mut y = match y {
                Some(y) => y,
                None => Placed::output(*together[count - 1].call.y(), Device::Cpu)?,
            };
            let value = |value: usize, planned: &TensorDesc| match value.checked_sub(given.len()) {
                None => lying_as(given[value], planned),
                Some(i) => {
                    let value = computed[i].as_ref().expect("it goes after its last reader");
                    lying_as(value.as_ref(), planned)
                }
            };
            let second = |step: &Step| {
                let second = step.second.zip(step.call.second());
                second.map(|(second, planned)| value(second, planned))
            };
            match &step.call {
                _ if let Some((chain, _)) = &step.chain => {
                    let links = together
                        .iter()
                        .zip(&mut filters)
                        .map(|(step, (w, bias))| Conv2dLink { w, bias, residual: second(step) });
                    let links: Vec<_> = links.collect();
                    let x = value(step.image, step.call.x());
                    chain.run(&x, &links, y.as_mut()?, workspace)?;
                }
                Call::Convolution(call) => {
                    let (weights, bias) = filters.next().expect("one for each convolution");
                    let args = Conv2dArgs::new(value(step.image, step.call.x()), weights)
                        .with_bias(bias)
                        .with_residual(second(step));
                    call.get().plan().run(&args, y.as_mut()?, workspace)?;
                }
                Call::Image(call) => {
                    let to: *mut f32 = y.as_mut()?.as_mut_ptr().cast();
                    let from = match step.in_place {
                        true => to.cast_const(),
                        false => value(step.image, step.call.x()).as_ptr().cast(),
                    };
                    let second = second(step).map_or(std::ptr::null(), |s| s.as_ptr().cast());
                    // SAFETY: `new` has compared steps, and the call its images. The result is new, or the image's
                    // memory if that is allowed.
                    unsafe { call.get().step().run(from, second, to) };
                }
            }
            computed.extend((1..count).map(|_| None));
            computed.push(Some(y));
            let last_read = together.iter().flat_map(|step| &step.last_read);
            last_read.for_each(|&value| computed[value - given.len()] = None);
        }
        Ok(computed)
    }
}

/// The tensor with the strides of `planned`, where its elements lie as those.
fn lying_as<'a>(tensor: TensorRef<'a>, planned: &TensorDesc) -> TensorRef<'a> {
    // SAFETY: the same elements: `new` has compared steps, and each call its images.
    unsafe { TensorRef::from_raw(tensor.as_ptr().cast_mut().cast(), *planned, Device::Cpu) }
}
