//! The views that a run takes, and their checks.

use super::CausalConv1dPlan;
use crate::tensor::{check_device, check_disjoint, check_optional_view, check_view};
use crate::{Result, TensorDesc, TensorMut, TensorRef};

/// The inputs of a run; see [`CausalConv1dSpec`](crate::CausalConv1dSpec) for shapes and types.
#[derive(Clone, Copy, Debug)]
pub struct CausalConv1dArgs<'a> {
    /// [b, d, l]
    pub x: TensorRef<'a>,
    /// [d, width] or [d_out, d, width]
    pub weight: TensorRef<'a>,
    /// `[d_out]`
    pub bias: Option<TensorRef<'a>>,
    /// [b, l]
    pub seq_idx: Option<TensorRef<'a>>,
    /// [sequences + 1]
    pub cu_seqlens: Option<TensorRef<'a>>,
    /// [b or sequences, d, width-1]
    pub initial_states: Option<TensorRef<'a>>,
}

impl<'a> CausalConv1dArgs<'a> {
    /// Input and weight alone.
    pub fn new(x: TensorRef<'a>, weight: TensorRef<'a>) -> Self {
        let (bias, seq_idx, cu_seqlens, initial_states) = (None, None, None, None);
        CausalConv1dArgs { x, weight, bias, seq_idx, cu_seqlens, initial_states }
    }

    /// Every view that is given, by name.
    fn views(&self) -> impl Iterator<Item = (&'static str, &TensorRef<'a>)> {
        let optional = [
            ("bias", &self.bias),
            ("seq_idx", &self.seq_idx),
            ("cu_seqlens", &self.cu_seqlens),
            ("initial_states", &self.initial_states),
        ];
        [("x", &self.x), ("weight", &self.weight)]
            .into_iter()
            .chain(optional.into_iter().filter_map(|(name, view)| Some((name, view.as_ref()?))))
    }
}

/// The outputs of a run; see [`CausalConv1dSpec`](crate::CausalConv1dSpec) for shapes and types.
#[derive(Debug)]
pub struct CausalConv1dOutputs<'a> {
    /// [b, d_out, l]
    pub y: TensorMut<'a>,
    /// [b or sequences, d, width-1]; copies, bit for bit.
    pub final_states: Option<TensorMut<'a>>,
}

impl CausalConv1dPlan {
    /// Checks views against the spec.
    pub(super) fn check_args(&self, args: &CausalConv1dArgs<'_>) -> Result<()> {
        let spec = &self.spec;
        for (name, view) in args.views() {
            check_device(name, view.device(), self.options.device)?;
        }
        check_view("x", args.x.desc(), &spec.x)?;
        check_view("weight", args.weight.desc(), &spec.weight)?;
        let optional: [(_, &Option<TensorRef<'_>>, &Option<TensorDesc>); 4] = [
            ("bias", &args.bias, &spec.bias),
            ("seq_idx", &args.seq_idx, &spec.seq_idx),
            ("cu_seqlens", &args.cu_seqlens, &spec.cu_seqlens),
            ("initial_states", &args.initial_states, &spec.initial_states),
        ];
        for (name, given, planned) in optional {
            check_optional_view(name, given.as_ref().map(TensorRef::desc), planned.as_ref())?;
        }
        Ok(())
    }

    /// Checks outputs against the spec, the inputs and each other.
    pub(super) fn check_outputs(
        &self,
        args: &CausalConv1dArgs<'_>,
        outputs: &CausalConv1dOutputs<'_>,
    ) -> Result<()> {
        self.check_output("y", &outputs.y, args)?;
        check_view("y", outputs.y.desc(), &self.spec.y)?;
        let final_desc = outputs.final_states.as_ref().map(TensorMut::desc);
        check_optional_view("final_states", final_desc, self.spec.final_states.as_ref())?;
        if let Some(final_states) = &outputs.final_states {
            self.check_output("final_states", final_states, args)?;
            check_disjoint("final_states", final_states, "y", &outputs.y.as_ref())?;
        }
        Ok(())
    }

    /// The device of an output, and that it shares no memory with an input.
    pub(super) fn check_output(
        &self,
        name: &'static str,
        output: &TensorMut<'_>,
        args: &CausalConv1dArgs<'_>,
    ) -> Result<()> {
        check_device(name, output.device(), self.options.device)?;
        for (input, view) in args.views() {
            check_disjoint(name, output, input, view)?;
        }
        Ok(())
    }
}
