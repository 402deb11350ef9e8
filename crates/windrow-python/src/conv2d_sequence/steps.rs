//! The steps of a sequence, and where their values lie.

use crate::array::lie_alike;
use crate::conv2d_call::Conv2dCall;
use crate::image_step::{ImageStep, ImageView};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::ops::Range;
use windrow::{Device, TensorDesc};

/// The first element of a value: bytes from the first one of an image, or of a result that has memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub value: usize,
    pub bytes: usize,
}

#[derive(FromPyObject)]
pub(super) enum Call {
    Convolution(Py<Conv2dCall>),
    Image(Py<ImageStep>),
    View(Py<ImageView>),
}

/// A call with the values that it reads, an image and what a convolution adds or a gate, and the value that it writes to.
pub(super) type Given = (Call, Option<usize>, Option<usize>, Option<usize>);

impl Call {
    /// The image that it reads.
    pub(super) fn x(&self) -> Option<&TensorDesc> {
        match self {
            Call::Convolution(call) => Some(&call.get().plan().spec().x),
            Call::Image(call) => Some(call.get().x()),
            Call::View(view) => view.get().of.as_ref().map(|(x, _)| x),
        }
    }

    /// A convolution's residual, a gate or what is added.
    pub(super) fn second(&self) -> Option<&TensorDesc> {
        match self {
            Call::Convolution(call) => {
                let spec = call.get().plan().spec();
                spec.residual.then_some(&spec.y)
            }
            Call::Image(call) => call.get().second(),
            Call::View(_) => None,
        }
    }

    pub(super) fn y(&self) -> &TensorDesc {
        match self {
            Call::Convolution(call) => &call.get().plan().spec().y,
            Call::Image(call) => call.get().step().y(),
            Call::View(view) => &view.get().y,
        }
    }

    pub(super) fn convolution(&self) -> Option<&Conv2dCall> {
        match self {
            Call::Convolution(call) => Some(call.get()),
            Call::Image(_) | Call::View(_) => None,
        }
    }

    /// The number of elements that tells whether the interpreter lock is released.
    pub(super) fn elements(&self) -> usize {
        match self {
            Call::Convolution(call) => call.get().elements(),
            Call::Image(call) => call.get().elements(),
            Call::View(_) => 0,
        }
    }
}

/// Where each value lies: where a step writes to, the channels of which value it is, or by itself.
pub(super) fn places(images: usize, steps: &[Given]) -> PyResult<Vec<Place>> {
    let mut places: Vec<_> = (0..images).map(|value| Place { value, bytes: 0 }).collect();
    for (i, (call, image, second, place)) in steps.iter().enumerate() {
        // Each value that is named is there, and lies as the call has seen it.
        let fits = |value: Option<usize>, desc: Option<&TensorDesc>| match (value, desc) {
            (Some(value), Some(desc)) => match value.checked_sub(images) {
                None => true,
                Some(step) => step < i && lie_alike(steps[step].0.y(), desc),
            },
            (value, desc) => value.is_none() && desc.is_none(),
        };
        let is_view = matches!(call, Call::View(_));
        let is_elsewhere = call.convolution().is_some_and(|c| c.device() != Device::Cpu);
        let is_placed = place.is_none() || !is_view && fits(*place, Some(call.y()));
        if is_elsewhere || !fits(*image, call.x()) || !fits(*second, call.second()) || !is_placed {
            let message = format!("step {i} does not fit those before it");
            return Err(PyValueError::new_err(message));
        }
        let at = match (call, *image, *place) {
            (Call::View(view), Some(image), _) => {
                let Place { value, bytes } = places[image];
                let of = &view.get().of;
                Place { value, bytes: bytes + of.as_ref().map_or(0, |(_, first)| *first) }
            }
            (_, _, Some(place)) => {
                let read = [image, second].into_iter().flatten();
                let y = channels(places[place], call.y());
                for (value, desc) in read.zip([call.x(), call.second()].into_iter().flatten()) {
                    let x = channels(places[*value], desc);
                    if places[*value].value == places[place].value
                        && x.start < y.end
                        && y.start < x.end
                    {
                        let message = format!("step {i} writes over what it reads");
                        return Err(PyValueError::new_err(message));
                    }
                }
                places[place]
            }
            _ => Place { value: images + i, bytes: 0 },
        };
        places.push(at);
    }
    Ok(places)
}

/// The bytes of a pixel's channels.
fn channels(place: Place, desc: &TensorDesc) -> Range<usize> {
    let channels = desc.shape().get(1).map_or(0, |c| c * desc.dtype.size());
    place.bytes..place.bytes + channels
}
