//! Parameter structures of kernels, declared by the host and compared with the device's by the compiler.

/// A field of a parameter structure, or an array whose elements are separate fields in the device's structure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(crate) names: &'static [&'static str],
    /// The fields of the base structure, if this field is the base structure. Such a field has no names.
    pub(crate) base: &'static [Field],
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// A structure that a kernel takes as its one argument.
///
/// # Safety
/// It must be `repr(C)`, and its fields must be exactly [`Params::FIELDS`].
pub(crate) unsafe trait Params: 'static {
    const FIELDS: &'static [Field];
}

/// Declares structures that kernels take. A field has its name in the `.cu` file, or `as [...]` lists the names there
/// of an array's elements. A structure that inherits another one in the `.cu` file begins with it here, as `base`.
macro_rules! params {
    (@names $field:ident) => { &[stringify!($field)] };
    (@names $field:ident $($part:ident),+) => { &[$(stringify!($part)),+] };
    ($(
        $(#[$about:meta])*
        $vis:vis struct $name:ident $(: $base:ident)? {
            $($(#[$note:meta])* $seen:vis $field:ident $(as [$($part:ident),+])?: $type:ty,)*
        }
    )*) => {$(
        $(#[$about])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        $vis struct $name { $(pub(crate) base: $base,)? $($(#[$note])* $seen $field: $type,)* }

        // SAFETY: as declared above.
        unsafe impl $crate::gpu::Params for $name {
            const FIELDS: &'static [$crate::gpu::Field] = &[
                $($crate::gpu::Field {
                    names: &[],
                    base: <$base as $crate::gpu::Params>::FIELDS,
                    offset: 0,
                    bytes: size_of::<$base>(),
                },)?
                $($crate::gpu::Field {
                    names: params!(@names $field $($($part),+)?),
                    base: &[],
                    offset: std::mem::offset_of!($name, $field),
                    bytes: size_of::<$type>(),
                },)*
            ];
        }
    )*};
}
pub(crate) use params;

/// The name, offset and bytes of each field of the device's structure.
pub(super) fn elements(
    fields: &'static [Field],
) -> Box<dyn Iterator<Item = (&'static str, usize, usize)>> {
    Box::new(fields.iter().flat_map(|&Field { names, base, offset, bytes }| {
        let bytes = bytes / names.len().max(1);
        let own = names.iter().enumerate().map(move |(i, name)| (*name, offset + i * bytes, bytes));
        elements(base).chain(own)
    }))
}

/// A C++ expression that is true if the structure `name` has these fields (name, offset, bytes) and `bytes` bytes. It
/// uses the backend's macro `OFFSET_OF(structure, field)`.
pub(super) fn agreement(
    name: &str,
    fields: impl Iterator<Item = (&'static str, usize, usize)>,
    bytes: usize,
) -> String {
    let mut all = format!("(sizeof({name})=={bytes}");
    for (field, offset, bytes) in fields {
        all += &format!("&&OFFSET_OF({name},{field})=={offset}");
        all += &format!("&&sizeof({name}::{field})=={bytes}");
    }
    all + ")"
}

#[cfg(test)]
mod tests {
    use crate::gpu::{KernelSpec, Source, compile_tests};

    params! {
        struct Pair {
            x: *const u8,
            strides: [i64; 2],
            size as [h, w]: [i32; 2],
        }
    }

    params! {
        struct Longer: Pair {
            count: i32,
        }
    }

    /// A kernel whose structure has these fields after those of a base.
    fn source(base: &str, fields: &str) -> &'static Source {
        let text = format!(
            "struct Base {{ {base} }}; struct Params : Base {{ {fields} }};
            static_assert(PARAMS_AGREE, \"as the host's structure\");
            extern \"C\" __global__ void KERNEL(Params p) {{}}"
        );
        Box::leak(Box::new(Source { name: "pair.cu", text: text.leak(), includes: &[] }))
    }

    #[test]
    fn structures_that_differ_do_not_compile() {
        let message = |fields: &str| {
            compile_tests::message(&KernelSpec::new(source("", fields), "pair").params::<Pair>())
        };
        let Some(none) = message("const char *x; long long strides[2]; int h, w;") else { return };
        assert_eq!(none, "");
        for fields in [
            "const char *x; long long strides[2]; int h, w, more;",
            "const char *y; long long strides[2]; int h, w;",
            "const char *x; long long strides[2]; int w, h;",
            "long long strides[2]; const char *x; int h, w;",
            "const char *x; long long strides[1]; long long more; int h, w;",
            "const char *x; long long strides[2]; long long h;",
        ] {
            let message = message(fields).unwrap();
            assert!(message.contains("error"), "{fields}: {message}");
        }
    }

    #[test]
    fn structures_that_begin_with_another_agree() {
        let message = |base: &str, fields: &str| {
            let source = source(base, fields);
            compile_tests::message(&KernelSpec::new(source, "longer").params::<Longer>())
        };
        let pair = "const char *x; long long strides[2]; int h, w;";
        let Some(none) = message(pair, "int count;") else { return };
        assert_eq!(none, "");
        for (base, fields) in [
            ("int count;", pair),
            (pair, "int other;"),
            (pair, "int w, count;"),
            ("const char *x; long long strides[2]; int w, h;", "int count;"),
        ] {
            let message = message(base, fields).unwrap();
            assert!(message.contains("error"), "{base} {fields}: {message}");
        }
    }
}
