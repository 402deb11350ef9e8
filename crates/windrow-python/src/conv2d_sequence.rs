//! Convolutions that follow each other, and what stands between them, in one call.

mod steps;

use self::steps::{Call, Given, Place, places};
use crate::array::Array;
use crate::call::run;
use crate::conv2d_call::Conv2dCall;
use crate::error::{IntoPy, NotInPlace};
use crate::output::Output;
use crate::seen::Seen;
use crate::torch::nothing_to_dispatch;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;
use windrow::cpu::with_team;
use windrow::internal::{Conv2dChain, Conv2dLink, prefetch};
use windrow::{Conv2dArgs, Device, Placed, TensorDesc, TensorMut, TensorRef, Weights, Workspace};

/// The number of elements of the largest step from which the threads are started for the whole call. Of smaller images
/// most convolutions run on the caller's thread alone.
const TEAM_FROM: usize = 64 << 10;

/// Calls on the CPU of which each reads images, or results of calls before it. With other images than those that the calls
/// were made for, after filters have got other memory, or if PyTorch's dispatcher has something to do for these tensors,
/// nothing is done and None returned.
///
/// Images and results are values, numbered in this order. A call may write to a value, such as channels of an image that
/// other calls write to as well.
#[pyclass(module = "windrow._native", frozen)]
pub(crate) struct Conv2dSequence {
    images: usize,
    /// Where each value lies.
    places: Vec<Place>,
    /// The memory that is there before a step writes to it, by value.
    memory: Vec<Option<TensorDesc>>,
    /// The steps that compute something.
    steps: Vec<Step>,
    /// What an image must be like, by its number.
    expected: Vec<(usize, TensorDesc)>,
    /// Those of the convolutions.
    filters: Vec<(Seen, Option<Seen>)>,
    /// The memory of those that have packed forms: as long as it lives, no other filter lies there.
    _aliases: Vec<Py<PyAny>>,
    /// Cache lines that comparisons of the filters read.
    lines: Vec<usize>,
    results: Vec<usize>,
    bytes: usize,
    elements: usize,
}

struct Step {
    call: Call,
    /// The value that it is.
    value: usize,
    image: usize,
    second: Option<usize>,
    /// The result is written over the image.
    in_place: bool,
    /// Results with memory of their own that nobody reads after it.
    last_read: Vec<usize>,
    /// This step and some after it, if they are computed together, and their number.
    chain: Option<(Conv2dChain, usize)>,
}

type Filter<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

#[pymethods]
impl Conv2dSequence {
    /// `filters` are those of the convolutions. `flat` are results with one pixel that are given as matrices.
    #[new]
    #[pyo3(signature = (images, steps, results, filters, flat=Vec::new()))]
    fn new(
        py: Python<'_>,
        images: usize,
        steps: Vec<Given>,
        results: Vec<usize>,
        filters: Vec<Filter<'_>>,
        flat: Vec<usize>,
    ) -> PyResult<Self> {
        let values = images + steps.len();
        let places = places(images, &steps)?;
        let is_wrong = |(i, value): (usize, &usize)| {
            let is_own = (images..values).contains(value) && places[*value].value == *value;
            !is_own || results[..i].contains(value)
        };
        if images == 0 || steps.iter().all(|(call, ..)| matches!(call, Call::View(_))) {
            return Err(PyValueError::new_err("no step computes something of an image"));
        }
        if results.iter().enumerate().any(is_wrong) {
            return Err(PyValueError::new_err("results are no different ones of steps"));
        }
        let mut last = vec![None; values];
        for (i, (_, image, second, place)) in steps.iter().enumerate() {
            for value in [image, second, place].into_iter().flatten() {
                last[places[*value].value] = Some(i);
            }
        }
        results.iter().for_each(|&value| last[value] = None);
        let convolutions = || steps.iter().filter_map(|(call, ..)| call.convolution());
        let bytes = convolutions().map(Conv2dCall::bytes).max().unwrap_or(0);
        let filters = filters.iter().map(|(weight, bias)| {
            let bias = bias.as_ref().map(|bias| Seen::of("bias", bias)).transpose()?;
            PyResult::Ok((Seen::of("weight", weight)?, bias))
        });
        let filters = filters.collect::<PyResult<Vec<_>>>()?;
        let aliases = convolutions().zip(&filters);
        let aliases =
            aliases.filter_map(|(call, (weight, _))| call.alias(weight.bind(py)).transpose());
        let aliases = aliases.collect::<PyResult<_>>()?;
        let fit = convolutions().zip(&filters).all(|(call, (weight, bias))| {
            let (spec, bias) = (call.plan().spec(), bias.as_ref().map(Seen::on_cpu));
            let is_of_call = weight.view().is_some_and(|weight| call.weights(py, weight).is_some());
            is_of_call && weight.on_cpu() == Some(&spec.w) && bias == spec.bias.as_ref().map(Some)
        });
        if convolutions().count() != filters.len() || !fit {
            return Err(PyValueError::new_err("filters do not fit the convolutions"));
        }
        let tensors = filters.iter().flat_map(|(weight, bias)| bias.iter().chain([weight]));
        let lines = tensors.flat_map(Seen::lines).collect();
        let elements = steps.iter().map(|(call, ..)| call.elements()).max().unwrap_or(0);
        let is_own = |value: usize| value >= images && places[value] == Place { value, bytes: 0 };
        let mut expected = Vec::new();
        let may_be_in_place: Vec<_> = steps
            .iter()
            .enumerate()
            .map(|(i, (call, image, second, place))| {
                let read = [(image, call.x()), (second, call.second()), (place, Some(call.y()))];
                for (value, desc) in read {
                    expected.extend(value.filter(|&value| value < images).zip(desc.copied()));
                }
                match (call, *image) {
                    (Call::Image(call), Some(value)) if is_own(value) && is_own(images + i) => {
                        let is_elsewhere = second.is_none_or(|s| places[s].value != value);
                        is_elsewhere && call.get().may_replace(steps[value - images].0.y())
                    }
                    _ => false,
                }
            })
            .collect();
        let memory = steps.iter().map(|(call, ..)| match call {
            Call::View(view) if view.get().of.is_none() => Some(view.get().y),
            _ => None,
        });
        let mut memory: Vec<_> = memory.collect();
        for &value in &flat {
            let y = match results.contains(&value) {
                true => matrix(steps[value - images].0.y())?,
                false => None,
            };
            let wrong =
                || PyValueError::new_err(format!("value {value} is no result of one pixel"));
            memory[value - images] = Some(y.ok_or_else(wrong)?);
        }
        let steps = steps.into_iter().enumerate().filter_map(|(i, (call, image, second, _))| {
            let image = image.filter(|_| !matches!(call, Call::View(_)))?;
            let last_read: Vec<_> =
                (images..values).filter(|&value| last[value] == Some(i)).collect();
            let in_place = may_be_in_place[i] && last_read.contains(&image);
            let value = images + i;
            Some(Step { call, value, image, second, in_place, last_read, chain: None })
        });
        let mut steps: Vec<Step> = steps.collect();
        let bytes = bytes.max(chain(&places, &mut steps)?);
        Ok(Conv2dSequence {
            images,
            places,
            memory,
            steps,
            expected,
            filters,
            _aliases: aliases,
            lines,
            results,
            bytes,
            elements,
        })
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
        let is_as_expected = |(image, desc): &(usize, TensorDesc)| {
            images[*image].device == Device::Cpu && images[*image].lies_as(desc)
        };
        if !self.expected.iter().all(is_as_expected) {
            return Ok(None);
        }
        let convolutions = self.steps.iter().filter_map(|step| step.call.convolution());
        let given_filters = convolutions.zip(&self.filters).map(|(call, (weight, bias))| {
            let weights = call.held_weights(weight.view().expect("`new` has compared it"));
            (weights, bias.as_ref().and_then(Seen::view))
        });
        let given_filters = given_filters.collect();
        let given: Vec<_> = images.iter().map(Array::view).collect();
        let computed = run(py, &images[0], self.bytes, self.elements, |workspace| {
            let compute = || self.compute(&given, given_filters, workspace);
            if self.elements < TEAM_FROM { compute() } else { with_team(compute) }
        });
        let mut computed = computed?;
        let finished = self.results.iter().map(|&value| {
            let result =
                match (computed[value - self.images].take(), self.memory[value - self.images]) {
                    (Some(result), _) => result,
                    // Nobody has written to it yet.
                    (None, memory) => {
                        let memory = memory.expect("each result is named once");
                        Placed::output(memory, Device::Cpu).py()?
                    }
                };
            Output::Own(result).finish(py, &images[0].family)
        });
        finished.collect::<PyResult<_>>().map(Some)
    }
}

/// The matrix [n, c] of an image with one pixel.
fn matrix(y: &TensorDesc) -> PyResult<Option<TensorDesc>> {
    let [n, c, 1, 1] = *y.shape() else { return Ok(None) };
    let matrix = TensorDesc::contiguous(y.dtype, &[n, c]).py()?;
    let strides = y.layout.strides();
    let is_dense = (n < 2 || strides[0] == c as isize) && (c < 2 || strides[1] == 1);
    Ok(is_dense.then_some(matrix))
}

/// Makes chains of steps where that pays. Gives the bytes of their workspace.
fn chain(places: &[Place], steps: &mut [Step]) -> PyResult<usize> {
    let (mut first, mut bytes) = (0, 0);
    while first < steps.len() {
        let mut count = chained(places, steps, first);
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
fn chained(places: &[Place], steps: &[Step], first: usize) -> usize {
    let follows = |&i: &usize| {
        let (before, step) = (&steps[i - 1], &steps[i]);
        step.image == before.value
            && places[step.image] == Place { value: step.image, bytes: 0 }
            && step.second.is_none_or(|second| places[second].value != step.image)
            && step.last_read.contains(&step.image)
            && before
                .call
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
        let mut computed = Computed { of: self, given, own: Vec::new() };
        computed.own.resize_with(self.memory.len(), || None);
        let mut filters = filters.into_iter();
        let mut at = 0;
        while at < self.steps.len() {
            let step = &self.steps[at];
            let count = step.chain.as_ref().map_or(1, |&(_, count)| count);
            let together = &self.steps[at..at + count];
            at += count;
            let last = &together[count - 1];
            for value in together.iter().flat_map(|step| [Some(step.image), step.second]).flatten()
            {
                computed.hold(value, None)?;
            }
            if step.in_place {
                computed.own[step.value - self.images] =
                    computed.own[step.image - self.images].take();
            }
            computed.hold(last.value, Some(last.call.y()))?;
            let to = computed.first(last.value);
            let x = if step.in_place { to } else { computed.first(step.image) };
            let view = |at: *mut u8, desc: &TensorDesc| {
                // SAFETY: `new` has compared steps, and each call its images.
                unsafe { TensorRef::from_raw(at.cast(), *desc, Device::Cpu) }
            };
            let second = |step: &Step| {
                let second = step.second.zip(step.call.second());
                second.map(|(second, desc)| view(computed.first(second), desc))
            };
            // SAFETY: as above; the result is new, or apart from what the step reads.
            let y = || unsafe { TensorMut::from_raw(to.cast(), *last.call.y(), Device::Cpu) };
            match &step.call {
                _ if let Some((chain, _)) = &step.chain => {
                    let links = together
                        .iter()
                        .zip(&mut filters)
                        .map(|(step, (w, bias))| Conv2dLink { w, bias, residual: second(step) });
                    let links: Vec<_> = links.collect();
                    let spec = step.call.x().expect("a convolution");
                    chain.run(&view(x, spec), &links, y()?, workspace)?;
                }
                Call::Convolution(call) => {
                    let (weights, bias) = filters.next().expect("one for each convolution");
                    let plan = call.get().plan();
                    let args = Conv2dArgs::new(view(x, &plan.spec().x), weights)
                        .with_bias(bias)
                        .with_residual(second(step));
                    plan.run(&args, y()?, workspace)?;
                }
                Call::Image(call) => {
                    let second = second(step).map_or(std::ptr::null(), |s| s.as_ptr().cast());
                    // SAFETY: `new` has compared steps, and the call its images. The result is apart, or the image's
                    // memory if that is allowed.
                    unsafe { call.get().step().run(x.cast_const().cast(), second, to.cast()) };
                }
                Call::View(_) => unreachable!("a view computes nothing"),
            }
            let last_read = together.iter().flat_map(|step| &step.last_read);
            last_read.for_each(|&value| computed.own[value - self.images] = None);
        }
        Ok(computed.own)
    }
}

/// The values of a call.
struct Computed<'a> {
    of: &'a Conv2dSequence,
    given: &'a [TensorRef<'a>],
    /// By value, from the first result on.
    own: Vec<Option<Placed>>,
}

impl Computed<'_> {
    /// Takes the memory of a value that is not there yet: what steps write to before it is read, or what is like `desc`.
    fn hold(&mut self, value: usize, desc: Option<&TensorDesc>) -> windrow::Result<()> {
        let Some(i) = self.of.places[value].value.checked_sub(self.given.len()) else {
            return Ok(());
        };
        if self.own[i].is_none()
            && let Some(desc) = self.of.memory[i].as_ref().or(desc)
        {
            self.own[i] = Some(Placed::output(*desc, Device::Cpu)?);
        }
        Ok(())
    }

    /// The first element of a value that is there.
    fn first(&self, value: usize) -> *mut u8 {
        let Place { value, bytes } = self.of.places[value];
        let at = match value.checked_sub(self.given.len()) {
            None => self.given[value].as_ptr(),
            Some(i) => {
                let value = self.own[i].as_ref().expect("it goes after its last reader");
                value.as_ref().as_ptr()
            }
        };
        at.wrapping_add(bytes).cast_mut()
    }
}
